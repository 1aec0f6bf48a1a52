// AES-128-GMAC: GCM (NIST SP 800-38D) with everything authenticated and nothing encrypted.
//
// A tag takes one block of AES and a GHASH over the data: 128-bit polynomials, multiplied by instructions where the
// machine has them, by tables elsewhere. The tests compare with the package `cryptography`.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define CARRYLESS __attribute__((target("pclmul,ssse3,sse4.1")))
#define CARRYLESS_WIDE __attribute__((target("vpclmulqdq,avx512f,avx512bw,pclmul,ssse3,sse4.1")))
#endif

namespace {

// One block of AES-128 (FIPS 197).
class Aes {
  public:
    explicit Aes(const uint8_t key[16]) {
        std::memcpy(keys_, key, 16);
        uint8_t constant = 1;
        for (int i = 16; i < 176; i += 4) {
            uint8_t word[4];
            std::memcpy(word, keys_ + i - 4, 4);
            if (i % 16 == 0) {
                uint8_t first = word[0];
                word[0] = box(word[1]) ^ constant, word[1] = box(word[2]), word[2] = box(word[3]), word[3] = box(first);
                constant = twice(constant);
            }
            for (int k = 0; k < 4; ++k) keys_[i + k] = keys_[i + k - 16] ^ word[k];
        }
    }

    void encrypt(uint8_t block[16]) const {
        add(block, 0);
        for (int round = 1; round <= 10; ++round) {
            uint8_t moved[16];
            for (int i = 0; i < 16; ++i) moved[i] = box(block[(i + 4 * (i % 4)) % 16]);
            for (int i = 0; i < 16; ++i) {
                const uint8_t* column = moved + i / 4 * 4;
                uint8_t all = column[0] ^ column[1] ^ column[2] ^ column[3];
                block[i] = round == 10 ? moved[i] : moved[i] ^ all ^ twice(moved[i] ^ column[(i + 1) % 4]);
            }
            add(block, round);
        }
    }

  private:
    static uint8_t twice(uint8_t x) { return uint8_t(x << 1 ^ (x >> 7) * 0x1b); }
    void add(uint8_t block[16], int round) const {
        for (int i = 0; i < 16; ++i) block[i] ^= keys_[16 * round + i];
    }
    struct Box {
        uint8_t of[256];
        Box() {
            uint8_t p = 1, q = 1;  // q is the inverse of p
            do {
                p ^= twice(p);
                q ^= q << 1, q ^= q << 2, q ^= q << 4;
                if (q & 0x80) q ^= 0x09;
                uint8_t x = q;
                for (int turn = 1; turn <= 4; ++turn) x ^= uint8_t(q << turn | q >> (8 - turn));
                of[p] = x ^ 0x63;
            } while (p != 1);
            of[0] = 0x63;
        }
    };
    static uint8_t box(uint8_t x) {
        static const Box made;
        return made.of[x];
    }
    uint8_t keys_[176];
};

// The polynomial x of GHASH: its first byte's highest bit is the coefficient of 1.
struct Block {
    uint64_t high, low;
};

inline Block loaded(const uint8_t* from) {
    uint64_t words[2];
    std::memcpy(words, from, 16);
    return {__builtin_bswap64(words[0]), __builtin_bswap64(words[1])};
}

inline void stored(Block block, uint8_t* to) {
    uint64_t words[2] = {__builtin_bswap64(block.high), __builtin_bswap64(block.low)};
    std::memcpy(to, words, 16);
}

// Keys of one direction.
class Gmac {
  public:
    static constexpr int POWERS = 32;
    explicit Gmac(const uint8_t key[16]) : aes_(key) {
        uint8_t zero[16] = {0};
        aes_.encrypt(zero);
        // Multiples of H by four bits.
        Block h = loaded(zero);
        table_[0] = {0, 0}, table_[8] = h;
        for (int i = 4; i > 0; i /= 2) {
            h = divided(h);
            table_[i] = h;
        }
        for (int i = 2; i < 16; i *= 2)
            for (int k = 1; k < i; ++k) table_[i + k] = {table_[i].high ^ table_[k].high, table_[i].low ^ table_[k].low};
        Block power = table_[8];
        for (int i = 0; i < POWERS; ++i, power = times_h(power)) powers_[i] = power;
    }

    // The sum of data that comes in pieces.
    class Sum {
      public:
        explicit Sum(const Gmac& keys) : keys_(keys) {}
        void add(const void* data, size_t size) {
            const uint8_t* at = static_cast<const uint8_t*>(data);
            total_ += size;
            if (held_) {
                size_t more = size < 16 - held_ ? size : 16 - held_;
                std::memcpy(rest_ + held_, at, more);
                held_ += more, at += more, size -= more;
                if (held_ < 16) return;
                keys_.blocks(sum_, rest_, 1);
            }
            keys_.blocks(sum_, at, size / 16);
            held_ = size % 16;
            std::memcpy(rest_, at + size - held_, held_);
        }
        // Writes the tag of everything added, the message at `place` of its direction.
        void finish(uint64_t place, uint8_t tag[16]) {
            if (held_) {
                std::memset(rest_ + held_, 0, 16 - held_);
                keys_.blocks(sum_, rest_, 1);
            }
            uint8_t lengths[16];
            stored({uint64_t(total_) * 8, 0}, lengths);
            keys_.blocks(sum_, lengths, 1);
            uint8_t pad[16] = {0};
            std::memcpy(pad + 4, &place, 8);  // little-endian
            pad[15] = 1;
            keys_.aes_.encrypt(pad);
            stored(sum_, tag);
            for (int i = 0; i < 16; ++i) tag[i] ^= pad[i];
        }

      private:
        const Gmac& keys_;
        Block sum_{0, 0};
        uint8_t rest_[16];
        size_t held_ = 0, total_ = 0;
    };

  private:
    static Block divided(Block v) {  // by x, which multiplies by it in this order of bits
        uint64_t carry = v.low & 1 ? 0xe100000000000000u : 0;
        return {v.high >> 1 ^ carry, v.high << 63 | v.low >> 1};
    }

    Block times_h(Block x) const {
        Block sum{0, 0};
        for (int i = 0; i < 32; ++i) {
            uint64_t word = i < 16 ? x.low >> 4 * i : x.high >> 4 * (i - 16);
            if (i) {
                for (int bit = 0; bit < 4; ++bit) sum = divided(sum);
            }
            sum.high ^= table_[word & 15].high, sum.low ^= table_[word & 15].low;
        }
        return sum;
    }

    void blocks(Block& sum, const uint8_t* at, size_t count) const {
#ifdef CARRYLESS
        static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("ssse3");
        static const bool four = can && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512bw");
        if (four && count >= POWERS) {
            size_t most = count / POWERS * POWERS;
            four_wide(sum, at, most);
            at += 16 * most, count -= most;
        }
        if (can) return wide(sum, at, count);
#endif
        for (; count; --count, at += 16) {
            Block next = loaded(at);
            sum = times_h({sum.high ^ next.high, sum.low ^ next.low});
        }
    }

#ifdef CARRYLESS
    // Gueron and Kounavis, "Carry-less multiplication and its usage for computing the GCM mode" (Intel, 2010), with
    // eight products for one reduction.
    CARRYLESS void wide(Block& sum, const uint8_t* at, size_t count) const {
        const __m128i turned = _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m128i x = _mm_set_epi64x(int64_t(sum.high), int64_t(sum.low)), h[8];
        for (int i = 0; i < 8; ++i) h[i] = _mm_set_epi64x(int64_t(powers_[i].high), int64_t(powers_[i].low));
        __m128i sums[8];  // of each power's halves, for Karatsuba's multiplication
        for (int i = 0; i < 8; ++i) sums[i] = _mm_xor_si128(h[i], _mm_shuffle_epi32(h[i], 0x4e));
        for (; count >= 8; count -= 8, at += 128) {
            __m128i low = _mm_setzero_si128(), high = low, middle = low;
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                __m128i block = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + i), turned);
                if (i == 0) block = _mm_xor_si128(block, x);
                low = _mm_xor_si128(low, _mm_clmulepi64_si128(block, h[7 - i], 0x00));
                high = _mm_xor_si128(high, _mm_clmulepi64_si128(block, h[7 - i], 0x11));
                block = _mm_xor_si128(block, _mm_shuffle_epi32(block, 0x4e));
                middle = _mm_xor_si128(middle, _mm_clmulepi64_si128(block, sums[7 - i], 0x00));
            }
            x = reduced(low, _mm_xor_si128(middle, _mm_xor_si128(low, high)), high);
        }
        for (; count; --count, at += 16) {
            __m128i block = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)), turned);
            block = _mm_xor_si128(block, x);
            __m128i middle = _mm_xor_si128(_mm_clmulepi64_si128(block, h[0], 0x10),
                                           _mm_clmulepi64_si128(block, h[0], 0x01));
            x = reduced(_mm_clmulepi64_si128(block, h[0], 0x00), middle, _mm_clmulepi64_si128(block, h[0], 0x11));
        }
        alignas(16) uint64_t words[2];
        _mm_store_si128(reinterpret_cast<__m128i*>(words), x);
        sum = {words[1], words[0]};
    }

    // The same with four blocks in a register, and `POWERS` products for one reduction; `count` is a multiple of that.
    CARRYLESS_WIDE void four_wide(Block& sum, const uint8_t* at, size_t count) const {
        const __m512i turned = _mm512_broadcast_i32x4(
            _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        __m512i h[POWERS / 4];  // h[i] meets blocks 4 i to 4 i + 3, the first of which has the highest power
        for (int i = 0; i < POWERS / 4; ++i) {
            uint64_t words[8];
            for (int k = 0; k < 4; ++k) {
                words[2 * k] = powers_[POWERS - 1 - 4 * i - k].low;
                words[2 * k + 1] = powers_[POWERS - 1 - 4 * i - k].high;
            }
            h[i] = _mm512_loadu_si512(words);
        }
        __m128i x = _mm_set_epi64x(int64_t(sum.high), int64_t(sum.low));
        for (; count; count -= POWERS, at += 16 * POWERS) {
            __m512i low = _mm512_setzero_si512(), high = low, middle = low;
#pragma GCC unroll 8
            for (int i = 0; i < POWERS / 4; ++i) {
                __m512i block = _mm512_shuffle_epi8(_mm512_loadu_si512(at + 64 * i), turned);
                if (i == 0) block = _mm512_xor_si512(block, _mm512_zextsi128_si512(x));
                low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128(block, h[i], 0x00));
                high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128(block, h[i], 0x11));
                middle = _mm512_ternarylogic_epi64(middle, _mm512_clmulepi64_epi128(block, h[i], 0x01),
                                                   _mm512_clmulepi64_epi128(block, h[i], 0x10), 0x96);
            }
            x = reduced(folded(low), folded(middle), folded(high));
        }
        alignas(16) uint64_t words[2];
        _mm_store_si128(reinterpret_cast<__m128i*>(words), x);
        sum = {words[1], words[0]};
    }

    CARRYLESS_WIDE static __m128i folded(__m512i x) {
        return _mm_xor_si128(_mm_xor_si128(_mm512_castsi512_si128(x), _mm512_extracti32x4_epi32(x, 1)),
                             _mm_xor_si128(_mm512_extracti32x4_epi32(x, 2), _mm512_extracti32x4_epi32(x, 3)));
    }

    CARRYLESS static __m128i reduced(__m128i low, __m128i middle, __m128i high) {
        low = _mm_xor_si128(low, _mm_slli_si128(middle, 8));
        high = _mm_xor_si128(high, _mm_srli_si128(middle, 8));
        // The product of two reflected polynomials is one bit too low.
        __m128i from_low = _mm_srli_epi32(low, 31), from_high = _mm_srli_epi32(high, 31);
        low = _mm_or_si128(_mm_slli_epi32(low, 1), _mm_slli_si128(from_low, 4));
        high = _mm_or_si128(_mm_slli_epi32(high, 1), _mm_slli_si128(from_high, 4));
        high = _mm_or_si128(high, _mm_srli_si128(from_low, 12));
        // Modulo x^128 + x^7 + x^2 + x + 1.
        __m128i first = _mm_xor_si128(_mm_xor_si128(_mm_slli_epi32(low, 31), _mm_slli_epi32(low, 30)),
                                      _mm_slli_epi32(low, 25));
        low = _mm_xor_si128(low, _mm_slli_si128(first, 12));
        __m128i second = _mm_xor_si128(_mm_xor_si128(_mm_srli_epi32(low, 1), _mm_srli_epi32(low, 2)),
                                       _mm_xor_si128(_mm_srli_epi32(low, 7), _mm_srli_si128(first, 4)));
        return _mm_xor_si128(high, _mm_xor_si128(low, second));
    }
#endif

    Aes aes_;
    Block table_[16];
    Block powers_[POWERS];  // of H, from the first on
};

}  // namespace
