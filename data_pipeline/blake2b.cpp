// The keyed BLAKE2b (RFC 7693) of many messages at once, several of them side by side in the lanes of a vector.
//
// Of each message the first eight bytes of a digest of eight bytes are given, as a little-endian number: what
// `hashlib.blake2b(message, digest_size=8, key=key)` gives. A message's blocks hang on each other, so one message is no
// faster than elsewhere; but lanes that are done take the next message, so many are.
#include <cstddef>
#include <cstdint>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr size_t kBlockBytes = 128;
constexpr size_t kDigestBytes = 8;
constexpr uint64_t kInitial[8] = {0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
                                  0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179};
constexpr uint8_t kSchedule[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

struct Messages {
    const uint8_t* const* starts;
    const uint64_t* lengths;
    uint64_t count;
    const uint8_t* key;
    uint64_t key_bytes;
    uint64_t* digests;
};

// One message on its way: its key block, its whole blocks, and a last one filled up with zeros.
struct Lane {
    const uint8_t* next;
    uint64_t left, hashed, number;
    bool busy, begun;
};

template <int kLanes>
struct VectorOf;
template <>
struct VectorOf<2> {
    typedef uint64_t Type __attribute__((vector_size(16)));
};
template <>
struct VectorOf<4> {
    typedef uint64_t Type __attribute__((vector_size(32)));
};
template <>
struct VectorOf<8> {
    typedef uint64_t Type __attribute__((vector_size(64)));
};

template <int kLanes>
struct Hasher {
    using Vector = typename VectorOf<kLanes>::Type;

    explicit INLINE Hasher(const Messages& all) : all_(all) { std::memcpy(key_block_, all.key, all.key_bytes); }

    INLINE void run() {
        uint64_t taken = 0, busy = 0;
        for (Lane& lane : lanes_) lane.busy = false;
        for (;;) {
            for (int i = 0; i < kLanes; i++) {
                if (lanes_[i].busy || taken == all_.count) continue;
                lanes_[i] = {all_.starts[taken], all_.lengths[taken], 0, taken, true, false};
                for (int word = 0; word < 8; word++) state_[word][i] = kInitial[word];
                state_[0][i] ^= 0x01010000 ^ all_.key_bytes << 8 ^ kDigestBytes;
                taken++;
                busy++;
            }
            if (busy == 0) return;
            alignas(sizeof(Vector)) uint64_t words[16][kLanes];
            Vector counted = {}, last = {};
            for (int i = 0; i < kLanes; i++) {
                const uint8_t* block = lanes_[i].busy ? next_block(lanes_[i], tails_[i]) : key_block_;
                uint64_t loaded[16];
                std::memcpy(loaded, block, kBlockBytes);
                for (int word = 0; word < 16; word++) words[word][i] = loaded[word];
                counted[i] = lanes_[i].hashed;
                last[i] = lanes_[i].busy && lanes_[i].left == 0 ? ~0ull : 0;
            }
            Vector message[16];
            std::memcpy(message, words, sizeof words);
            compress(message, counted, last);
            for (int i = 0; i < kLanes; i++) {
                if (!lanes_[i].busy || lanes_[i].left != 0) continue;
                all_.digests[lanes_[i].number] = state_[0][i];
                lanes_[i].busy = false;
                busy--;
            }
        }
    }

   private:
    // The block to hash now; `hashed` and `left` are then as after it.
    INLINE const uint8_t* next_block(Lane& lane, uint8_t* tail) {
        if (!lane.begun) {
            lane.begun = true;
            lane.hashed = kBlockBytes;
            return key_block_;
        }
        const uint8_t* block = lane.next;
        const uint64_t size = lane.left < kBlockBytes ? lane.left : kBlockBytes;
        if (size < kBlockBytes) {
            std::memset(tail, 0, kBlockBytes);
            std::memcpy(tail, block, size);
            block = tail;
        }
        lane.next += size;
        lane.left -= size;
        lane.hashed += size;
        return block;
    }

    static INLINE Vector turned(const Vector& x, int bits) { return x >> bits | x << (64 - bits); }

    static INLINE void mix(Vector& a, Vector& b, Vector& c, Vector& d, const Vector& x, const Vector& y) {
        a += b + x;
        d = turned(d ^ a, 32);
        c += d;
        b = turned(b ^ c, 24);
        a += b + y;
        d = turned(d ^ a, 16);
        c += d;
        b = turned(b ^ c, 63);
    }

    INLINE void compress(const Vector* m, const Vector& counted, const Vector& last) {
        Vector v[16];
        for (int i = 0; i < 8; i++) {
            v[i] = state_[i];
            v[i + 8] = Vector{} + kInitial[i];
        }
        v[12] ^= counted;
        v[14] ^= last;
#pragma GCC unroll 12
        for (int round = 0; round < 12; round++) {
            const uint8_t* s = kSchedule[round];
            mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
            mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
            mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
            mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
            mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
            mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
            mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
            mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
        }
        for (int i = 0; i < 8; i++) state_[i] ^= v[i] ^ v[i + 8];
    }

    const Messages& all_;
    uint8_t key_block_[kBlockBytes] = {};
    Lane lanes_[kLanes];
    uint8_t tails_[kLanes][kBlockBytes];
    Vector state_[8];
};

void hash_plain(const Messages& all) { Hasher<2>(all).run(); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void hash_avx2(const Messages& all) { Hasher<4>(all).run(); }
__attribute__((target("avx512f"))) void hash_avx512(const Messages& all) { Hasher<8>(all).run(); }
#endif

}  // namespace

// digests: one number a message. The key has 1 to 64 bytes.
API void blake2b_keyed(const uint8_t* const* messages, const uint64_t* lengths, uint64_t count, const uint8_t* key,
                       uint64_t key_bytes, uint64_t* digests) {
    const Messages all{messages, lengths, count, key, key_bytes, digests};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return hash_avx512(all);
    if (__builtin_cpu_supports("avx2")) return hash_avx2(all);
#endif
    hash_plain(all);
}
