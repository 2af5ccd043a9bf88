#include "core.h"

#include <cstdio>
#include <exception>

#include "encoder.h"
#include "model.h"

#ifndef FASTBPE_BUILD_ID
#define FASTBPE_BUILD_ID "none"
#endif

using namespace fastbpe;

struct fastbpe_model {
    Model model;
};

struct fastbpe_encoder {
    std::unique_ptr<Encoder> encoder;
};

namespace {

constexpr uint64_t kMostBytes = 1ull << 48;  // more than any address space holds: products below never overflow

bool ends_are_sound(const uint64_t* ends, uint64_t count, uint64_t bytes) {
    uint64_t begin = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (ends[i] < begin || ends[i] > bytes) return false;
        begin = ends[i];
    }
    return true;
}

// Runs what may throw, and gives its failure as a status.
template <typename Call>
int32_t guarded(Call call) {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        return FASTBPE_OUT_OF_MEMORY;
    } catch (const SegmentTooLong&) {
        return FASTBPE_SEGMENT_TOO_LONG;
    } catch (const std::exception&) {  // length_error of a vector: a size beyond what it can ever hold
        return FASTBPE_OUT_OF_MEMORY;
    }
}

}  // namespace

FASTBPE_API const char* fastbpe_build_id() { return FASTBPE_BUILD_ID; }

FASTBPE_API int32_t fastbpe_model_new(const fastbpe_vocabulary* given, fastbpe_model** out, char* reason,
                                      uint64_t reason_bytes) {
    if (!given || !out || !given->text || !given->ends || !given->scores || !given->types || given->size == 0 ||
        given->size > kMaxVocabulary || given->text_bytes > kMostBytes ||
        !ends_are_sound(given->ends, given->size, given->text_bytes)) {
        return FASTBPE_BAD_ARGUMENT;
    }
    return guarded([&]() -> int32_t {
        const Vocabulary vocabulary{given->text, given->ends,           given->scores,           given->types,
                                    given->size, given->byte_fallback != 0, given->dummy_prefix != 0};
        try {
            *out = new fastbpe_model{Model(vocabulary)};
            return FASTBPE_OK;
        } catch (const BadModel& bad) {
            if (reason && reason_bytes) std::snprintf(reason, reason_bytes, "%s", bad.what());
            return FASTBPE_BAD_MODEL;
        }
    });
}

FASTBPE_API void fastbpe_model_free(fastbpe_model* model) { delete model; }

FASTBPE_API uint64_t fastbpe_model_bytes(const fastbpe_model* model) { return model->model.bytes(); }

FASTBPE_API uint32_t fastbpe_id_bytes(const fastbpe_model* model) { return model->model.size <= 65536 ? 2 : 4; }

FASTBPE_API int32_t fastbpe_encoder_new(const fastbpe_model* model, uint64_t cache_bytes, fastbpe_encoder** out) {
    if (!model || !out || cache_bytes > kMaxCacheBytes) return FASTBPE_BAD_ARGUMENT;
    return guarded([&]() -> int32_t {
        std::unique_ptr<Encoder> encoder;
        if (fastbpe_id_bytes(model) == 2) {
            encoder = std::make_unique<EncoderOf<uint16_t>>(model->model, cache_bytes);
        } else {
            encoder = std::make_unique<EncoderOf<uint32_t>>(model->model, cache_bytes);
        }
        *out = new fastbpe_encoder{std::move(encoder)};
        return FASTBPE_OK;
    });
}

FASTBPE_API void fastbpe_encoder_free(fastbpe_encoder* encoder) { delete encoder; }

FASTBPE_API void fastbpe_encoder_stats(const fastbpe_encoder* encoder, fastbpe_stats* out) {
    *out = encoder->encoder->stats();
}

FASTBPE_API int32_t fastbpe_encode(fastbpe_encoder* encoder, const uint8_t* text, uint64_t text_bytes,
                                   const uint64_t* ends, uint64_t count, uint64_t* id_ends) {
    if (!encoder || !text || (count != 0 && (!ends || !id_ends)) || text_bytes > kMostBytes ||
        !ends_are_sound(ends, count, text_bytes)) {
        return FASTBPE_BAD_ARGUMENT;
    }
    return guarded([&]() -> int32_t {
        encoder->encoder->encode(text, ends, count, id_ends);
        return FASTBPE_OK;
    });
}

FASTBPE_API int32_t fastbpe_take(fastbpe_encoder* encoder, void* ids, uint64_t count) {
    if (!encoder || (count != 0 && !ids)) return FASTBPE_BAD_ARGUMENT;
    return encoder->encoder->take(ids, count) ? FASTBPE_OK : FASTBPE_BAD_ARGUMENT;
}
