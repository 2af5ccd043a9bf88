// Text -> ids: cut, look up, merge what is new.
//
// A text is cut into segments (segments.h), three to five bytes each on average. A group of them is handled in two
// passes: the first computes keys and asks the processor to fetch the sets of the cache, the second compares and copies
// ids. A segment that is not there is merged (merge.h) and kept. Nearly all are there: words repeat.
//
// A byte of text becomes at most three ids: a space outside the vocabulary, as the bytes of U+2581 (and a malformed
// byte as those of U+FFFD). Memory of a call beside the caches: its ids; 37 bytes a character for a segment over 63
// bytes; a copy of up to three bytes a byte for a text that is not UTF-8. Of this at most about 14 MB are kept between
// calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "cache.h"
#include "core.h"
#include "merge.h"
#include "model.h"
#include "segments.h"

namespace fastbpe {

// Ids of one call. Grows; room for what comes next is made beforehand, so that writing needs no check.
template <typename Id>
class Ids {
   public:
    ~Ids() { std::free(data_); }
    Ids() = default;
    Ids(const Ids&) = delete;
    Ids& operator=(const Ids&) = delete;

    // Room for `more` ids at the end.
    Id* room(size_t more) {
        if (capacity_ - size_ < more) grow(more);
        return data_ + size_;
    }
    void wrote_until(const Id* end) { size_ = static_cast<size_t>(end - data_); }
    void cut_to(size_t size) { size_ = size; }
    size_t size() const { return size_; }
    size_t capacity() const { return capacity_; }
    Id* data() { return data_; }
    void release() {
        std::free(data_);
        data_ = nullptr;
        size_ = capacity_ = 0;
    }

   private:
    void grow(size_t more) {
        constexpr size_t kMost = SIZE_MAX / sizeof(Id);
        if (more > kMost - size_) throw std::bad_alloc();
        const size_t half = capacity_ / 2;
        const size_t capacity = std::max(size_ + more, capacity_ + std::min(half, kMost - capacity_));
        void* grown = std::realloc(data_, capacity * sizeof(Id));
        if (grown == nullptr) throw std::bad_alloc();
        data_ = static_cast<Id*>(grown);
        capacity_ = capacity;
    }
    Id* data_ = nullptr;
    size_t size_ = 0, capacity_ = 0;
};

class Encoder {
   public:
    virtual ~Encoder() = default;
    virtual void encode(const uint8_t* text, const uint64_t* ends, size_t count, uint64_t* id_ends) = 0;
    virtual bool take(void* ids, size_t count) = 0;  // false: not as many as there are
    virtual fastbpe_stats stats() const = 0;
};

template <typename Id>
class EncoderOf final : public Encoder {
   public:
    EncoderOf(const Model& model, size_t cache_bytes)
        : model_(model), short_(cache_bytes - cache_bytes / 8), long_(cache_bytes / 8) {}

    void encode(const uint8_t* text, const uint64_t* ends, size_t count, uint64_t* id_ends) override {
        ids_.cut_to(0);
        readable_end_ = text + (count == 0 ? 0 : ends[count - 1]);
        uint64_t begin = 0;
        try {
            for (size_t i = 0; i < count; i++) {
                encode_text(text + begin, text + ends[i]);
                begin = ends[i];
                id_ends[i] = ids_.size();
            }
            publish();
        } catch (...) {
            ids_.release();
            merger_.release();
            publish();
            throw;
        }
    }

    bool take(void* ids, size_t count) override {
        if (count != ids_.size()) return false;
        if (count != 0) std::memcpy(ids, ids_.data(), count * sizeof(Id));
        ids_.cut_to(0);
        if (ids_.capacity() * sizeof(Id) > kKeptBytes) ids_.release();
        publish();
        return true;
    }

    fastbpe_stats stats() const override {
        fastbpe_stats stats{};
        stats.hits = hits_.load(std::memory_order_relaxed);
        stats.misses = misses_.load(std::memory_order_relaxed);
        stats.evictions = evictions_.load(std::memory_order_relaxed);
        stats.cache_bytes = short_.bytes() + long_.bytes();
        stats.scratch_bytes = scratch_bytes_.load(std::memory_order_relaxed);
        return stats;
    }

   private:
    // Nearly all segments have at most 15 bytes and 7 (with 32-bit ids 3) ids; these sets are one cache line each.
    using Short = Cache<Id, 2, 32>;
    using Long = Cache<Id, 8, 128>;
    using ShortSet = typename Short::Set;
    static constexpr size_t kKeptBytes = 8 << 20;
    // Ids that a group of segments can have when none is longer than ShortMerger takes.
    static constexpr size_t kGroupIds = Segments::kMaxCuts * ShortMerger::kMaxIds + Long::kMaxIds;

    void encode_text(const uint8_t* begin, const uint8_t* end) {
        const size_t first_id = ids_.size();
        if (!encode_well_formed(begin, end)) {
            ids_.cut_to(first_id);
            std::vector<uint8_t> mended;
            mended.reserve(static_cast<size_t>(end - begin) + 64);
            mend(begin, end, mended);
            const uint8_t* readable_end = readable_end_;
            readable_end_ = mended.data() + mended.size();
            encode_well_formed(mended.data(), readable_end_);
            readable_end_ = readable_end;
        }
        if (!model_.byte_fallback) fuse_unknown(first_id);
    }

    // False when the text is not UTF-8; what was written then means nothing.
    bool encode_well_formed(const uint8_t* begin, const uint8_t* end) {
        Segments segments(model_.neighbours, begin, end);
        const uint8_t* cuts[Segments::kMaxCuts];
        bool prefixed = !model_.dummy_prefix;
        while (const int count = segments.find(cuts)) {
            if (count == Segments::kMalformed) return false;
            int first = 0;
            if (!prefixed) {
                prefixed = true;
                encode_prefixed(begin, cuts[0]);
                begin = cuts[0];
                first = 1;
            }
            encode_group(begin, cuts + first, count - first);
            begin = cuts[count - 1];
        }
        return true;
    }

    // The first segment of a text with a space before it. Whether the two may be cut apart doesn't matter.
    void encode_prefixed(const uint8_t* begin, const uint8_t* end) {
        std::vector<uint8_t> prefixed;
        prefixed.reserve(static_cast<size_t>(end - begin) + 1);
        prefixed.push_back(' ');
        prefixed.insert(prefixed.end(), begin, end);
        const uint8_t* readable_end = readable_end_;
        readable_end_ = prefixed.data() + prefixed.size();
        const uint8_t* cut = readable_end_;
        encode_group(prefixed.data(), &cut, 1);
        readable_end_ = readable_end;
    }

    struct Lookup {
        typename Short::Key key;
        ShortSet* set;  // null: too long for it
    };

    void encode_group(const uint8_t* begin, const uint8_t* const* cuts, int count) {
        Lookup lookups[Segments::kMaxCuts];
        const uint8_t* p = begin;
        for (int i = 0; i < count; p = cuts[i++]) {
            const auto length = static_cast<size_t>(cuts[i] - p);
            lookups[i].set = nullptr;
            if (length > Short::Key::kMaxLength) continue;
            lookups[i].key = short_key(p, length);
            lookups[i].set = short_.set_of(lookups[i].key);
            __builtin_prefetch(lookups[i].set);
        }
        Id* out = ids_.room(kGroupIds);
        uint64_t hits = 0;
        p = begin;
        for (int i = 0; i < count; p = cuts[i++]) {
            const Lookup& lookup = lookups[i];
            if (lookup.set != nullptr) {
                if (const auto* entry = Short::find(lookup.set, lookup.key)) {
                    std::memcpy(out, entry->ids, sizeof entry->ids);
                    out += entry->count;
                    hits++;
                    continue;
                }
            }
            out = encode_segment(p, static_cast<size_t>(cuts[i] - p), lookup, out);
        }
        ids_.wrote_until(out);
        new_hits_ += hits;
    }

    // One segment that the short cache doesn't hold. Returns where the next ids go, with room for a group.
    __attribute__((noinline)) Id* encode_segment(const uint8_t* p, size_t length, const Lookup& lookup, Id* out) {
        if (lookup.set != nullptr) {
            const size_t count = ShortMerger::run(model_, p, length, out);
            new_misses_++;
            if (count <= Short::kMaxIds) new_evictions_ += short_.put(lookup.set, lookup.key, out, count);
            return out + count;
        }
        if (length <= Long::Key::kMaxLength) {
            typename Long::Key key{};
            std::memcpy(key.words, p, length);
            key.words[7] |= static_cast<uint64_t>(length) << 56;
            auto* set = long_.set_of(key);
            if (const auto* entry = Long::find(set, key)) {
                std::memcpy(out, entry->ids, sizeof entry->ids);
                new_hits_++;
                return out + entry->count;
            }
            const size_t count = ShortMerger::run(model_, p, length, out);
            new_misses_++;
            if (count <= Long::kMaxIds) new_evictions_ += long_.put(set, key, out, count);
            return out + count;
        }
        new_misses_++;
        ids_.wrote_until(out);
        const size_t count = merger_.run(model_, p, p + length);
        out = ids_.room(count + kGroupIds);
        merger_.write(model_, out);
        if (length > kKeptBytes / 64) merger_.release();
        return out + count;
    }

    typename Short::Key short_key(const uint8_t* p, size_t length) const {
        typename Short::Key key{};
        if (__builtin_expect(readable_end_ - p >= 16, 1)) {
            std::memcpy(key.words, p, 16);
            key.words[0] &= kMasks.of[length][0];
            key.words[1] &= kMasks.of[length][1];
        } else {
            std::memcpy(key.words, p, length);
        }
        key.words[1] |= static_cast<uint64_t>(length) << 56;
        return key;
    }

    // SentencePiece gives one unknown id for a run of unknown characters.
    void fuse_unknown(size_t first) {
        Id* ids = ids_.data();
        size_t kept = first;
        for (size_t i = first; i < ids_.size(); i++) {
            if (ids[i] == model_.unknown_id && kept > first && ids[kept - 1] == model_.unknown_id) continue;
            ids[kept++] = ids[i];
        }
        ids_.cut_to(kept);
    }

    void publish() {
        hits_.fetch_add(new_hits_, std::memory_order_relaxed);
        misses_.fetch_add(new_misses_, std::memory_order_relaxed);
        evictions_.fetch_add(new_evictions_, std::memory_order_relaxed);
        scratch_bytes_.store(ids_.capacity() * sizeof(Id) + merger_.bytes(), std::memory_order_relaxed);
        new_hits_ = new_misses_ = new_evictions_ = 0;
    }

    struct Masks {
        uint64_t of[16][2] = {};
        constexpr Masks() {
            for (int length = 0; length < 16; length++) {
                for (int byte = 0; byte < length; byte++) of[length][byte / 8] |= 0xFFull << (byte % 8 * 8);
            }
        }
    };
    static constexpr Masks kMasks{};

    const Model& model_;
    Short short_;
    Long long_;
    LongMerger merger_;
    Ids<Id> ids_;
    const uint8_t* readable_end_ = nullptr;  // no byte at or behind it may be read
    uint64_t new_hits_ = 0, new_misses_ = 0, new_evictions_ = 0;       // of this call
    std::atomic<uint64_t> hits_{0}, misses_{0}, evictions_{0};  // of all before; read from any thread, as is:
    std::atomic<uint64_t> scratch_bytes_{0};
};

}  // namespace fastbpe
