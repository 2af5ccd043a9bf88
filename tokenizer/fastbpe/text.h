// UTF-8 as SentencePiece reads it.
//
// A text may hold any bytes. SentencePiece reads a byte that begins no well-formed character (stray, truncated,
// overlong, surrogate, above U+10FFFF) as U+FFFD and goes on with the next byte. Well-formed text is the rule, so the
// scan for cuts checks it on the way (segments.h) and only a text that fails is copied, mended, and begun again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "fastbpe needs GCC or Clang and a little-endian 64-bit machine; elsewhere SentencePiece encodes"
#endif

namespace fastbpe {

constexpr uint32_t kSpace = 0x20;
constexpr uint32_t kSpaceMark = 0x2581;  // what SentencePiece writes for a space

// The UTF-8 bytes of one character as a number, first byte lowest. Equal spellings are equal characters.
using Spelling = uint32_t;

// What must follow a first byte. `length` 0: no character begins with it.
struct Lead {
    uint8_t length = 0;
    uint8_t second_low = 0, second_span = 0;  // the second byte is in [second_low, second_low + second_span]
    Spelling mask = 0;                        // the bytes of the character among the four read
    Spelling tail_mask = 0, tail = 0;         // top two bits of its bytes 3 and 4, and what they must be
};

struct Leads {
    Lead of[256];

    constexpr Leads() : of() {
        for (int byte = 0x00; byte < 0x80; byte++) of[byte] = {1, 0x00, 0xFF, 0xFF, 0, 0};
        for (int byte = 0xC2; byte < 0xE0; byte++) of[byte] = {2, 0x80, 0x3F, 0xFFFF, 0, 0};
        for (int byte = 0xE0; byte < 0xF0; byte++) of[byte] = {3, 0x80, 0x3F, 0xFFFFFF, 0xC00000, 0x800000};
        for (int byte = 0xF0; byte < 0xF5; byte++) of[byte] = {4, 0x80, 0x3F, 0xFFFFFFFF, 0xC0C00000, 0x80800000};
        of[0xE0].second_low = 0xA0, of[0xE0].second_span = 0x1F;  // below: overlong
        of[0xED].second_span = 0x1F;                              // above: surrogates
        of[0xF0].second_low = 0x90, of[0xF0].second_span = 0x2F;  // below: overlong
        of[0xF4].second_span = 0x0F;                              // above: beyond U+10FFFF
    }
};

inline constexpr Leads kLeads;

// Length of the character that begins at p < end, and its spelling; 0 when none does.
inline uint32_t read_character(const uint8_t* p, const uint8_t* end, Spelling* spelling) {
    uint32_t four = 0;
    if (end - p >= 4) {
        std::memcpy(&four, p, 4);
    } else {
        std::memcpy(&four, p, static_cast<size_t>(end - p));  // zeros behind the end are no continuation bytes
    }
    const Lead& lead = kLeads.of[four & 0xFF];
    *spelling = four & lead.mask;
    const uint8_t above = static_cast<uint8_t>((four >> 8) - lead.second_low);
    return (above <= lead.second_span) & ((four & lead.tail_mask) == lead.tail) ? lead.length : 0;
}

// Code point of a well-formed character.
inline uint32_t code_point(Spelling spelling, uint32_t length) {
    const uint32_t b0 = spelling & 0xFF;
    const uint32_t b1 = spelling >> 8 & 0x3F, b2 = spelling >> 16 & 0x3F, b3 = spelling >> 24 & 0x3F;
    switch (length) {
        case 1: return b0;
        case 2: return (b0 & 0x1F) << 6 | b1;
        case 3: return (b0 & 0x0F) << 12 | b1 << 6 | b2;
        default: return (b0 & 0x07) << 18 | b1 << 12 | b2 << 6 | b3;
    }
}

// Writes the 1 to 4 bytes of a code point, returns how many.
inline uint32_t spell(uint32_t code, uint8_t out[4]) {
    if (code < 0x80) {
        out[0] = static_cast<uint8_t>(code);
        return 1;
    }
    const uint32_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (uint32_t i = length - 1; i > 0; i--, code >>= 6) out[i] = static_cast<uint8_t>(0x80 | (code & 0x3F));
    out[0] = static_cast<uint8_t>((0xF00 >> length) | code);
    return length;
}

// Appends the text [p, end) to `mended` with U+FFFD for every malformed byte: what SentencePiece's normaliser does.
inline void mend(const uint8_t* p, const uint8_t* end, std::vector<uint8_t>& mended) {
    static constexpr uint8_t kReplacement[3] = {0xEF, 0xBF, 0xBD};
    Spelling spelling;
    while (p < end) {
        if (const uint32_t length = read_character(p, end, &spelling)) {
            mended.insert(mended.end(), p, p + length);
            p += length;
        } else {
            mended.insert(mended.end(), kReplacement, kReplacement + 3);
            p++;
        }
    }
}

}  // namespace fastbpe
