// Where a text may be cut (see Neighbours), found many cuts at a time.
//
// 64 ASCII characters are looked at without a branch a character; other text goes character by character and is checked
// to be well-formed on the way. Time is linear, and a segment may be as long as the text.
#pragma once

#include <cstdint>

#include "model.h"
#include "text.h"

namespace fastbpe {

class Segments {
   public:
    static constexpr int kMaxCuts = 192;
    static constexpr int kMalformed = -1;

    Segments(const Neighbours& neighbours, const uint8_t* begin, const uint8_t* end)
        : neighbours_(neighbours), ascii_cuts_(neighbours.ascii_cuts()), next_(begin), end_(end) {}

    // Puts the ends of the next segments into `cuts`, at most kMaxCuts, and says how many: 0 when the text is used up,
    // kMalformed when it is not UTF-8.
    int find(const uint8_t* cuts[kMaxCuts]) {
        int count = 0;
        if (next_ == end_) return 0;
        if (previous_ == kNone) {  // the first character: no cut before it
            const uint32_t length = read_character(next_, end_, &previous_);
            if (length == 0) return kMalformed;
            next_ += length;
        }
        while (next_ < end_ && count <= kMaxCuts - kWindow - 1) {
            const bool window = end_ - next_ >= kWindow;
            if (window && previous_ < 0x80 && is_ascii(next_)) {
                for (uint64_t mask = ascii_window(); mask != 0; mask &= mask - 1) {
                    cuts[count++] = next_ + __builtin_ctzll(mask);
                }
                previous_ = next_[kWindow - 1];
                next_ += kWindow;
                continue;
            }
            for (const uint8_t* stop = window ? next_ + kWindow : end_; next_ < stop;) {
                Spelling spelling;
                const uint32_t length = read_character(next_, end_, &spelling);
                if (__builtin_expect(length == 0, 0)) return kMalformed;
                cuts[count] = next_;
                count += !neighbours_.joined(previous_, spelling);
                previous_ = spelling;
                next_ += length;
            }
        }
        if (next_ == end_) cuts[count++] = end_;
        return count;
    }

   private:
    static constexpr int kWindow = 64;
    static constexpr Spelling kNone = 0xFFFFFFFF;  // no character's spelling

    static bool is_ascii(const uint8_t* p) {
        uint64_t words[kWindow / 8], high = 0;
        std::memcpy(words, p, kWindow);
        for (const uint64_t word : words) high |= word;
        return (high & 0x8080808080808080) == 0;
    }

    // Bit i: the text may be cut before next_[i].
    uint64_t ascii_window() const {
        uint64_t mask = 0;
        uint32_t left = previous_;
        for (int i = 0; i < kWindow; i++) {
            const uint32_t right = next_[i];
            mask |= static_cast<uint64_t>(ascii_cuts_[left << 7 | right]) << i;
            left = right;
        }
        return mask;
    }

    const Neighbours& neighbours_;
    const uint8_t* ascii_cuts_;
    const uint8_t* next_;  // the next character to look at
    const uint8_t* end_;
    Spelling previous_ = kNone;
};

}  // namespace fastbpe
