// The core without Python, for sanitizers: encodes texts from a file and prints their ids.
//
//     driver MODEL TEXTS CACHE_BYTES
//
// MODEL: u32 pieces, u8 byte fallback, u8 dummy prefix, then per piece u8 type, f32 score, u32 length, bytes.
// TEXTS: per text u32 length, bytes. Numbers are little-endian. A line of output per text.
//
// Every text is encoded twice: with all others in one call, and alone in a buffer of exactly its size, so that a read
// behind the end is seen. The two must agree.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../../../tokenizer/fastbpe/core.h"

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "driver: %s\n", what);
    std::exit(1);
}

struct Reader {
    std::string data;
    size_t place = 0;

    explicit Reader(const char* path) {
        std::ifstream file(path, std::ios::binary);
        require(file.good(), "a file can't be read");
        data.assign(std::istreambuf_iterator<char>(file), {});
    }
    bool at_end() const { return place == data.size(); }
    std::string bytes(size_t length) {
        require(length <= data.size() - place, "a file is cut short");
        place += length;
        return data.substr(place - length, length);
    }
    template <typename Number>
    Number number() {
        Number number;
        std::memcpy(&number, bytes(sizeof number).data(), sizeof number);
        return number;
    }
};

std::vector<uint32_t> encode(fastbpe_encoder* encoder, uint32_t id_bytes, const std::string& joined,
                             const std::vector<uint64_t>& ends, std::vector<uint64_t>* id_ends) {
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[joined.size()]);
    if (!joined.empty()) std::memcpy(exact.get(), joined.data(), joined.size());
    id_ends->assign(ends.size(), 0);
    const int32_t status =
        fastbpe_encode(encoder, exact.get(), joined.size(), ends.data(), ends.size(), id_ends->data());
    require(status == FASTBPE_OK, "encode failed");
    const size_t count = ends.empty() ? 0 : static_cast<size_t>(id_ends->back());
    std::vector<uint32_t> wide(count);
    std::vector<uint16_t> narrow(count);
    void* out = id_bytes == 2 ? static_cast<void*>(narrow.data()) : static_cast<void*>(wide.data());
    require(fastbpe_take(encoder, out, count) == FASTBPE_OK, "take failed");
    if (id_bytes == 2) wide.assign(narrow.begin(), narrow.end());
    return wide;
}

}  // namespace

int main(int argc, char** argv) {
    require(argc == 4, "MODEL TEXTS CACHE_BYTES");
    Reader file(argv[1]);
    const auto size = file.number<uint32_t>();
    const auto byte_fallback = file.number<uint8_t>(), dummy_prefix = file.number<uint8_t>();
    std::string text;
    std::vector<uint64_t> ends;
    std::vector<float> scores;
    std::vector<uint8_t> types;
    while (!file.at_end()) {
        types.push_back(file.number<uint8_t>());
        scores.push_back(file.number<float>());
        text += file.bytes(file.number<uint32_t>());
        ends.push_back(text.size());
    }
    require(ends.size() == size, "not as many pieces as promised");
    const auto* pieces = reinterpret_cast<const uint8_t*>(text.data());
    const fastbpe_vocabulary vocabulary{pieces,       text.size(), ends.data(),   scores.data(),
                                        types.data(), size,        byte_fallback, dummy_prefix};
    fastbpe_model* model = nullptr;
    char reason[200] = "";
    require(fastbpe_model_new(&vocabulary, &model, reason, sizeof reason) == FASTBPE_OK, reason);
    fastbpe_encoder* encoder = nullptr;
    require(fastbpe_encoder_new(model, std::strtoull(argv[3], nullptr, 10), &encoder) == FASTBPE_OK, "no encoder");

    Reader corpus(argv[2]);
    std::vector<std::string> texts;
    std::string joined;
    std::vector<uint64_t> text_ends, id_ends, one_end;
    while (!corpus.at_end()) {
        texts.push_back(corpus.bytes(corpus.number<uint32_t>()));
        joined += texts.back();
        text_ends.push_back(joined.size());
    }
    const uint32_t id_bytes = fastbpe_id_bytes(model);
    const std::vector<uint32_t> ids = encode(encoder, id_bytes, joined, text_ends, &id_ends);
    size_t begin = 0;
    for (size_t i = 0; i < texts.size(); i++) {
        const std::vector<uint32_t> together(ids.begin() + static_cast<ptrdiff_t>(begin),
                                             ids.begin() + static_cast<ptrdiff_t>(id_ends[i]));
        begin = static_cast<size_t>(id_ends[i]);
        require(encode(encoder, id_bytes, texts[i], {texts[i].size()}, &one_end) == together, "a text alone differs");
        for (size_t j = 0; j < together.size(); j++) std::printf(j ? " %u" : "%u", together[j]);
        std::printf("\n");
    }
    fastbpe_encoder_free(encoder);
    fastbpe_model_free(model);
    return 0;
}
