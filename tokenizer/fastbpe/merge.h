// BPE of one segment, as SentencePiece does it.
//
// Of all neighbours that make a piece, those of the lowest rank are merged first, the leftmost of equal rank. A segment
// of at most kShort bytes is held in two small arrays and each merge looks at all of it; a longer one is a linked list
// with a heap, n log n in its n characters, 36 bytes a character.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "model.h"
#include "text.h"

namespace fastbpe {

struct SegmentTooLong : std::length_error {
    using std::length_error::length_error;
};

// The symbol of the character that begins at p; moves p behind it. A space is U+2581.
inline Symbol read_symbol(const Model& model, const uint8_t*& p, const uint8_t* end) {
    Spelling spelling;
    const uint32_t length = read_character(p, end, &spelling);
    const uint32_t code = code_point(spelling, length);
    p += length;
    return model.characters.symbol(code == kSpace ? kSpaceMark : code);
}

// Writes the ids that a symbol ends as, returns how many: its own, else those of its bytes, else the unknown one.
template <typename Id>
inline size_t write_ids(const Model& model, Symbol symbol, Id* out) {
    if (symbol < kNoPiece) {
        out[0] = static_cast<Id>(symbol);
        return 1;
    }
    if (!model.byte_fallback) {
        out[0] = static_cast<Id>(model.unknown_id);
        return 1;
    }
    uint8_t bytes[4];
    const uint32_t length = spell(symbol & ~kNoPiece, bytes);
    for (uint32_t i = 0; i < length; i++) out[i] = static_cast<Id>(model.byte_ids[bytes[i]]);
    return length;
}

class ShortMerger {
   public:
    static constexpr size_t kMaxBytes = 64;
    static constexpr size_t kMaxIds = 3 * kMaxBytes;  // a space is one byte, and may become the three of U+2581

    template <typename Id>
    static size_t run(const Model& model, const uint8_t* p, size_t length, Id* out) {
        Symbol symbols[kMaxBytes];
        Merges::Merge merges[kMaxBytes];  // [i]: what symbols i and i + 1 make
        size_t n = 0;
        for (const uint8_t* end = p + length; p < end; n++) symbols[n] = read_symbol(model, p, end);
        for (size_t i = 0; i + 1 < n; i++) merges[i] = model.merges.find(symbols[i], symbols[i + 1]);
        while (n > 1) {
            uint64_t best = ~0ull;
            for (size_t i = 0; i + 1 < n; i++) best = std::min(best, static_cast<uint64_t>(merges[i].rank) << 32 | i);
            if (best >> 32 == kNoRank) break;
            const size_t at = static_cast<uint32_t>(best);
            symbols[at] = merges[at].piece;
            n--;
            for (size_t i = at + 1; i < n; i++) symbols[i] = symbols[i + 1];
            for (size_t i = at + 1; i + 1 < n; i++) merges[i] = merges[i + 1];
            if (at + 1 < n) merges[at] = model.merges.find(symbols[at], symbols[at + 1]);
            if (at > 0) merges[at - 1] = model.merges.find(symbols[at - 1], symbols[at]);
        }
        size_t written = 0;
        for (size_t i = 0; i < n; i++) written += write_ids(model, symbols[i], out + written);
        return written;
    }
};

class LongMerger {
   public:
    // Merges the segment and returns how many ids it will have; `write` then gives them.
    size_t run(const Model& model, const uint8_t* p, const uint8_t* end) {
        read(model, p, end);
        heap_.clear();
        heap_.reserve(2 * nodes_.size());  // enough: a merge takes one out and puts at most two in
        for (uint32_t i = 0; i + 1 < nodes_.size(); i++) look(model, i, i + 1);
        std::make_heap(heap_.begin(), heap_.end(), std::greater<uint64_t>());
        while (!heap_.empty()) {
            std::pop_heap(heap_.begin(), heap_.end(), std::greater<uint64_t>());
            const uint64_t top = heap_.back();
            heap_.pop_back();
            const auto left = static_cast<uint32_t>(top);
            // A pair that has changed since has another rank, or was swallowed and has none.
            if (nodes_[left].merge.rank == static_cast<uint32_t>(top >> 32)) merge(model, left);
        }
        return count_ids(model);
    }

    template <typename Id>
    void write(const Model& model, Id* out) const {
        for (uint32_t i = 0; i != kEnd; i = nodes_[i].next) out += write_ids(model, nodes_[i].symbol, out);
    }

    size_t bytes() const { return nodes_.capacity() * sizeof(Node) + heap_.capacity() * sizeof(uint64_t); }

    void release() {
        std::vector<Node>().swap(nodes_);  // `= {}` would keep the memory
        std::vector<uint64_t>().swap(heap_);
    }

   private:
    static constexpr uint32_t kEnd = 0xFFFFFFFF;
    struct Node {
        Symbol symbol;
        uint32_t previous, next;
        Merges::Merge merge;  // of this symbol and the next
    };

    void read(const Model& model, const uint8_t* p, const uint8_t* end) {
        size_t count = 0;
        for (const uint8_t* q = p; q < end; q++) count += (*q & 0xC0) != 0x80;
        if (count >= kEnd) throw SegmentTooLong("a segment of 2^32 - 1 characters or more");
        nodes_.clear();
        nodes_.reserve(count);
        for (uint32_t i = 0; p < end; i++) nodes_.push_back({read_symbol(model, p, end), i - 1, i + 1, Merges::kNone});
        nodes_.front().previous = kEnd;
        nodes_.back().next = kEnd;
    }

    // Notes what two neighbours make. Returns whether they make something, which is then last in heap_.
    bool look(const Model& model, uint32_t left, uint32_t right) {
        Node& node = nodes_[left];
        node.merge = model.merges.find(node.symbol, nodes_[right].symbol);
        if (node.merge.rank == kNoRank) return false;
        heap_.push_back(static_cast<uint64_t>(node.merge.rank) << 32 | left);
        return true;
    }

    void look_and_push(const Model& model, uint32_t left, uint32_t right) {
        if (look(model, left, right)) std::push_heap(heap_.begin(), heap_.end(), std::greater<uint64_t>());
    }

    void merge(const Model& model, uint32_t left) {
        Node& node = nodes_[left];
        Node& swallowed = nodes_[node.next];
        node.symbol = node.merge.piece;
        node.merge = swallowed.merge = Merges::kNone;
        node.next = swallowed.next;
        if (node.next != kEnd) {
            nodes_[node.next].previous = left;
            look_and_push(model, left, node.next);
        }
        if (node.previous != kEnd) look_and_push(model, node.previous, left);
    }

    size_t count_ids(const Model& model) const {
        size_t count = 0;
        uint32_t ids[4];
        for (uint32_t i = 0; i != kEnd; i = nodes_[i].next) count += write_ids(model, nodes_[i].symbol, ids);
        return count;
    }

    std::vector<Node> nodes_;
    std::vector<uint64_t> heap_;  // rank << 32 | left node; the least is the next merge
};

}  // namespace fastbpe
