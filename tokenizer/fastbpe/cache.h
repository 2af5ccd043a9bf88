// Segment -> ids, for the segments seen lately.
//
// A segment's ids depend on its bytes alone, so an entry is never wrong, and an entry is used only when its whole key
// (every byte and the length) equals the segment's. What to keep is a matter of speed alone.
//
// Memory is fixed when the cache is made: sets of two entries of one size, in one block that the system fills with
// zeros as it is touched. A new entry takes the place of one that was not used since it came; only when both of the set
// were used are both asked again (CLOCK, a set at a time). So text that occurs once doesn't drive out text that
// returns. Keys that were chosen to fall into one set cost what merging them costs, no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastbpe {

constexpr size_t kMaxCacheBytes = size_t{1} << 36;  // so that the sets are fewer than 2^32

// The bytes of a segment padded with zeros to a fixed number of words; the last byte is the length. Never all zeros,
// since no segment is empty: so a free entry, all zeros, equals no key.
template <size_t kWords>
struct Key {
    static constexpr size_t kMaxLength = 8 * kWords - 1;
    uint64_t words[kWords];

    bool operator==(const Key& other) const {
        uint64_t difference = 0;
        for (size_t i = 0; i < kWords; i++) difference |= words[i] ^ other.words[i];
        return difference == 0;
    }
    uint32_t hash() const {
        uint64_t hash = words[0];
        for (size_t i = 1; i < kWords; i++) {
            hash = (hash ^ hash >> 32) * 0x9E3779B97F4A7C15;
            hash ^= words[i] << 23 | words[i] >> 41;
        }
        hash *= 0xD6E8FEB86659FD93;
        hash = (hash ^ hash >> 32) * 0x9E3779B97F4A7C15;
        return static_cast<uint32_t>(hash >> 32);
    }
};

template <typename Id, size_t kWords, size_t kEntryBytes>
class Cache {
   public:
    using Key = fastbpe::Key<kWords>;
    static constexpr size_t kMaxIds = (kEntryBytes - sizeof(Key) - 2) / sizeof(Id);
    struct alignas(kEntryBytes) Entry {
        Key key;
        Id ids[kMaxIds];
        uint8_t count;
        uint8_t used;
    };
    static_assert(sizeof(Entry) == kEntryBytes);
    struct Set {
        Entry entries[2];
    };

    // The largest cache of at most `bytes`, at least one set.
    explicit Cache(size_t bytes) : sets_(bytes / sizeof(Set) < 1 ? 1 : bytes / sizeof(Set)) {
        constexpr size_t kAlignment = 1 << 12;
        block_ = std::calloc(1, sets_ * sizeof(Set) + kAlignment);
        if (block_ == nullptr) throw std::bad_alloc();
        const uintptr_t aligned = (reinterpret_cast<uintptr_t>(block_) + kAlignment - 1) & ~(kAlignment - 1);
        table_ = reinterpret_cast<Set*>(aligned);
#if defined(MADV_HUGEPAGE)
        madvise(table_, sets_ * sizeof(Set), MADV_HUGEPAGE);  // a wish; refused, it is only slower
#endif
    }
    ~Cache() { std::free(block_); }
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    Set* set_of(const Key& key) const {
        return table_ + (static_cast<uint64_t>(key.hash()) * sets_ >> 32);
    }

    // The entry of this key, or null.
    static Entry* find(Set* set, const Key& key) {
        Entry* entry = &set->entries[set->entries[1].key == key];
        if (!(entry->key == key)) return nullptr;
        if (!entry->used) entry->used = 1;
        return entry;
    }

    // Keeps the ids of a key that is not there. Returns whether another key had to go.
    bool put(Set* set, const Key& key, const Id* ids, size_t count) {
        Entry* victim = &set->entries[0];
        if (victim->used) victim = &set->entries[1];
        if (victim->used) {
            set->entries[0].used = 0;
            set->entries[1].used = 0;
            victim = &set->entries[turn_++ & 1];
        }
        const bool evicted = victim->count != 0;
        victim->key = key;
        std::memcpy(victim->ids, ids, count * sizeof(Id));
        victim->count = static_cast<uint8_t>(count);
        victim->used = 0;
        return evicted;
    }

    size_t bytes() const { return sets_ * sizeof(Set); }

   private:
    uint64_t sets_;
    void* block_ = nullptr;
    Set* table_ = nullptr;
    unsigned turn_ = 0;
};

}  // namespace fastbpe
