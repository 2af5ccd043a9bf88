// The tables of one vocabulary: built once, never changed, shared by all encoders.
//
// SentencePiece's BPE begins with the characters of a text and merges, again and again, the two neighbours whose
// concatenation is the piece of highest score (the leftmost, if scores are equal), until no two neighbours make a
// piece. Here a symbol is a piece's id, or kNoPiece | code point for a character that is no piece; Merges knows, for
// two symbols, the piece they make and its rank. Ranks order the pieces as their float32 scores do: equal scores have
// equal ranks, the highest score has rank 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "text.h"

namespace fastbpe {

using Symbol = uint32_t;
constexpr Symbol kNoPiece = 0x80000000;
constexpr uint32_t kNoRank = 0xFFFFFFFF;
constexpr uint32_t kMaxVocabulary = 1u << 24;
constexpr size_t kMaxPieceBytes = 1024;  // building takes time quadratic in the length of a piece

// Numbers as in SentencePiece's model file.
enum PieceType : uint8_t { kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6 };

struct BadModel : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

struct Vocabulary {
    const uint8_t* text;   // the pieces end to end
    const uint64_t* ends;  // where piece i ends in `text`
    const float* scores;
    const uint8_t* types;
    uint32_t size;
    bool byte_fallback;
    bool dummy_prefix;

    std::string_view piece(uint32_t id) const {
        const uint64_t begin = id == 0 ? 0 : ends[id - 1];
        return {reinterpret_cast<const char*>(text) + begin, static_cast<size_t>(ends[id] - begin)};
    }
};

// (left symbol, right symbol) -> what they merge to. Open addressing, at most half full.
class Merges {
   public:
    struct Merge {
        uint32_t rank, piece;
    };
    struct Rule {
        uint64_t symbols;
        Merge merge;
    };
    static constexpr Merge kNone{kNoRank, 0};

    void build(const std::vector<Rule>& rules);

    Merge find(Symbol left, Symbol right) const {
        const uint64_t symbols = key(left, right);
        for (size_t i = home(symbols);; i = (i + 1) & mask_) {
            if (rules_[i].symbols == symbols) return rules_[i].merge;
            if (rules_[i].symbols == kFree) return kNone;
        }
    }
    static uint64_t key(Symbol left, Symbol right) { return static_cast<uint64_t>(left) << 32 | right; }
    size_t bytes() const { return rules_.size() * sizeof(Rule); }

   private:
    static constexpr uint64_t kFree = ~0ull;  // no two symbols: code points end at 0x10FFFF
    size_t home(uint64_t symbols) const {
        symbols *= 0x9E3779B97F4A7C15;
        return (symbols ^ symbols >> 32) & mask_;
    }
    std::vector<Rule> rules_;
    size_t mask_ = 0;
};

// Code point -> the piece that is this character alone, else kNoPiece | code point. Pages of 256; page 0 is empty.
class Characters {
   public:
    Characters() : page_of_(0x1100, 0), pages_(256, kNoPiece) {}
    void set(uint32_t code, uint32_t piece);

    Symbol symbol(uint32_t code) const {
        const Symbol found = pages_[static_cast<size_t>(page_of_[code >> 8]) << 8 | (code & 0xFF)];
        return found == kNoPiece ? kNoPiece | code : found;
    }
    size_t bytes() const { return page_of_.size() * 2 + pages_.size() * 4; }

   private:
    std::vector<uint16_t> page_of_;
    std::vector<Symbol> pages_;
};

// Which two characters stand side by side inside some piece. Only between those can a merge happen, so everywhere else
// the text may be cut: every merge that SentencePiece makes joins two neighbours into a piece, a piece made across the
// cut would hold the two characters side by side, and none does. Each part then merges as it would within the whole,
// since a merge depends on nothing but the scores of neighbours, and the order of merges in different parts is free.
// A wrong "yes" costs speed alone, so the pairs beyond ASCII are kept in a filter of one hashed bit each. A character
// outside the vocabulary is in no pair and stands alone.
class Neighbours {
   public:
    // Pairs of spellings, with U+2581 for spaces; both ways to write a space are entered.
    void build(std::vector<uint64_t> pairs);

    bool joined(Spelling left, Spelling right) const {
        const uint64_t bit = hash(left, right) >> shift_;
        return filter_[bit >> 6] >> (bit & 63) & 1;
    }
    // 1 where a text may be cut between two ASCII characters: at [left << 7 | right].
    const uint8_t* ascii_cuts() const { return ascii_cuts_.data(); }
    size_t bytes() const { return ascii_cuts_.size() + filter_.size() * 8; }

   private:
    static uint64_t hash(Spelling left, Spelling right) {
        return (left * 0xD6E8FEB86659FD93ull + right) * 0x9E3779B97F4A7C15ull;
    }
    std::vector<uint8_t> ascii_cuts_;
    std::vector<uint64_t> filter_;
    int shift_ = 0;
};

struct Model {
    explicit Model(const Vocabulary& vocabulary);  // throws BadModel

    Merges merges;
    Characters characters;
    Neighbours neighbours;
    uint32_t byte_ids[256] = {};  // with byte fallback
    uint32_t unknown_id = 0;
    uint32_t size = 0;
    bool byte_fallback = false;
    bool dummy_prefix = false;

    size_t bytes() const { return sizeof *this + merges.bytes() + characters.bytes() + neighbours.bytes(); }
};

}  // namespace fastbpe
