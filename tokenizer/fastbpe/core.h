// The C interface, called from encoder.py through ctypes. No exception and no Python passes it.
//
// A model is immutable: any number of encoders, each in any thread, may share it, and must be freed before it. An
// encoder serves one call at a time. Functions that can fail return a fastbpe_status; a call that failed has changed
// nothing that matters to the next one.
#pragma once

#include <cstdint>

#define FASTBPE_API extern "C" __attribute__((visibility("default")))

struct fastbpe_model;
struct fastbpe_encoder;

enum fastbpe_status : int32_t {
    FASTBPE_OK = 0,
    FASTBPE_BAD_ARGUMENT = 1,
    FASTBPE_BAD_MODEL = 2,
    FASTBPE_OUT_OF_MEMORY = 3,
    FASTBPE_SEGMENT_TOO_LONG = 4,
};

struct fastbpe_vocabulary {
    const uint8_t* text;   // the pieces end to end, UTF-8
    uint64_t text_bytes;
    const uint64_t* ends;  // [size] where each piece ends in `text`
    const float* scores;   // [size]
    const uint8_t* types;  // [size] as in SentencePiece's model file
    uint32_t size;         // 1 to 2^24
    uint8_t byte_fallback;
    uint8_t dummy_prefix;
};

struct fastbpe_stats {
    uint64_t hits, misses, evictions;  // segments, of the calls that have ended
    uint64_t cache_bytes;              // what the caches may hold, at most
    uint64_t scratch_bytes;            // what is kept beside them until the next call
};

// Hash of the sources this was built from.
FASTBPE_API const char* fastbpe_build_id();

// `reason`, of `reason_bytes`, receives one clause when the answer is FASTBPE_BAD_MODEL.
FASTBPE_API int32_t fastbpe_model_new(const fastbpe_vocabulary*, fastbpe_model** out, char* reason,
                                      uint64_t reason_bytes);
FASTBPE_API void fastbpe_model_free(fastbpe_model*);
FASTBPE_API uint64_t fastbpe_model_bytes(const fastbpe_model*);
FASTBPE_API uint32_t fastbpe_id_bytes(const fastbpe_model*);  // 2 for vocabularies of at most 65,536 pieces, else 4

FASTBPE_API int32_t fastbpe_encoder_new(const fastbpe_model*, uint64_t cache_bytes, fastbpe_encoder** out);
FASTBPE_API void fastbpe_encoder_free(fastbpe_encoder*);
FASTBPE_API void fastbpe_encoder_stats(const fastbpe_encoder*, fastbpe_stats* out);

// Encodes `count` texts, which lie end to end in `text`; text i ends at ends[i]. id_ends[i] receives where its ids end
// among the ids of all, so id_ends[count - 1] is the number of ids, which stay with the encoder until the next call.
FASTBPE_API int32_t fastbpe_encode(fastbpe_encoder*, const uint8_t* text, uint64_t text_bytes, const uint64_t* ends,
                                   uint64_t count, uint64_t* id_ends);

// Copies the ids of the last call, `count` of them, and lets go of memory that a usual call doesn't need.
FASTBPE_API int32_t fastbpe_take(fastbpe_encoder*, void* ids, uint64_t count);
