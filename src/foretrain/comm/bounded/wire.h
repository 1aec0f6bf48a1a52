// Packets of the bounded transport: a header of 40 bytes, then whole values. All numbers are little-endian.
//
// The tag is a keyed checksum (Carter and Wegman): NH, the universal hash of UMAC (RFC 4418), of the data, and SipHash-2-4
// of the header and of that. Two wrong packets in 2^32 pass where an attacker knows nothing of the keys; damage, other
// jobs and strangers fail alike. The keys are of one direction between two engines, and made anew for each, so that no
// packet passes anywhere else, nor after a restart.
//
// Note [Numbers]. Each packet has a number of its own, also where what it says went before, so that none passes twice:
// receivers remember the last 65,000 numbers (a sliding bitmap, RFC 6479), and drop what has one of these or is older.
// Data are counted apart from signals: congestion control takes gaps between them for losses. A packet has the lower half
// of its number; the tag is of the upper half, too (as in RFC 4303), so that none passes when the lower half comes again.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

enum Message : uint8_t { DATA, ACK, STOP, PROBE, MAP, PING, GONE, BYE, MESSAGES };
// ACK: what has come. STOP: a transfer needs nothing more, and has lost these. PROBE: what is missing? MAP: this is.
// PING: is anyone there? With data: do packets of this size come? `index` says how many of the other side's have come.
// GONE: this rank has lost another. BYE: this rank has ended; all its operations before `operation` are done.

// Flags.
const uint8_t IMPORTANT = 1;  // not to be dropped
const uint8_t ANSWER = 2;     // DATA: the sender waits for an acknowledgement
const uint8_t FINAL = 4;      // DATA: of the last hundredth of its array that goes

struct Header {
    uint64_t tag;
    uint32_t job;           // number of the job, for a first look
    uint16_t source;        // rank
    uint8_t kind, flags;
    uint32_t operation;
    uint16_t stage;         // of the operation; a rank sends each other at most one array per stage
    uint16_t length;        // bytes of data behind the header
    uint32_t index;         // DATA: of the packet in the array; ACK: the highest number of data that came;
                            // MAP: of the first bit; GONE: the lost rank
    uint32_t number;        // lower half, see Note [Numbers]
    uint32_t stamp;         // µs of the sender's clock; ACK, MAP: of the packet that it answers
    uint32_t opened;        // operations whose arrays the sender can take
};
static_assert(sizeof(Header) == 40, "the layout is the protocol");

struct Arrived {            // data of an ACK
    uint32_t packets, marked;   // in all
};

// Of one direction: words for NH, as many as a packet has and two more, and a key for SipHash.
struct Keys {
    const uint32_t* words;
    uint64_t sip[2];
};

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

// NH of whole pairs of words. A word is multiplied by the one 256 bytes further on, and of what is left at the end, by the
// one half of that further on: so that memory is read in order, which is twice as fast as two halves of a packet at once.
WIDE uint64_t pairs(const char* data, const uint32_t* keys, size_t words) {
    const size_t block = 64;  // words of each side
    uint64_t sum = 0;
    for (; words; ) {
        size_t side = words >= 2 * block ? block : words / 2;
        const char* other = data + 4 * side;
        for (size_t i = 0; i < side; ++i) {
            uint32_t a, b;
            std::memcpy(&a, data + 4 * i, 4);
            std::memcpy(&b, other + 4 * i, 4);
            sum += uint64_t(uint32_t(a + keys[i])) * uint32_t(b + keys[side + i]);
        }
        data += 8 * side, keys += 2 * side, words -= 2 * side;
    }
    return sum;
}

inline uint64_t universal(const Keys& keys, const char* data, size_t size) {
    size_t words = size / 8 * 2;
    uint64_t sum = pairs(data, keys.words, words);
    if (size_t rest = size % 8) {
        uint32_t tail[2] = {0, 0};
        std::memcpy(tail, data + 4 * words, rest);
        sum += uint64_t(uint32_t(tail[0] + keys.words[words])) * uint32_t(tail[1] + keys.words[words + 1]);
    }
    return sum;
}

inline uint64_t turned(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

struct Sip {
    uint64_t a, b, c, d;
    void round() {
        a += b; b = turned(b, 13); b ^= a; a = turned(a, 32);
        c += d; d = turned(d, 16); d ^= c;
        a += d; d = turned(d, 21); d ^= a;
        c += b; b = turned(b, 17); b ^= c; c = turned(c, 32);
    }
    void take(uint64_t word) {
        d ^= word;
        round(), round();
        a ^= word;
    }
};

// The number whose lower half is `low`, next to a known one.
inline uint64_t full_number(uint32_t low, uint64_t near) { return near + uint64_t(int64_t(int32_t(low - uint32_t(near)))); }

// Numbers that have come; see Note [Numbers].
class Seen {
  public:
    uint64_t highest() const { return highest_; }
    // Returns whether a number comes for the first time, and is not too old.
    bool add(uint64_t number) {
        uint64_t word = number / 64, last = highest_ / 64, bit = uint64_t(1) << number % 64;
        if (word + WORDS <= last) return false;
        if (word > last + WORDS) last = word - WORDS;
        while (last < word) words_[++last % WORDS] = 0;
        if (words_[word % WORDS] & bit) return false;
        words_[word % WORDS] |= bit;
        highest_ = highest_ < number ? number : highest_;
        return true;
    }

  private:
    static const uint64_t WORDS = 1024;
    uint64_t highest_ = 0, words_[WORDS] = {};
};

// The tag of a packet, whose own field is left out, and the upper half of its number.
inline uint64_t tag_of(const Keys& keys, const Header& header, uint64_t number, const char* data) {
    Sip sip{keys.sip[0] ^ 0x736f6d6570736575u, keys.sip[1] ^ 0x646f72616e646f6du, keys.sip[0] ^ 0x6c7967656e657261u,
            keys.sip[1] ^ 0x7465646279746573u};
    uint64_t words[4];
    std::memcpy(words, reinterpret_cast<const char*>(&header) + sizeof header.tag, sizeof words);
    for (uint64_t word : words) sip.take(word);
    sip.take(universal(keys, data, header.length));
    sip.take(uint64_t(44) << 56 | number >> 32);  // and bytes that were hashed, as the last word of SipHash says
    sip.c ^= 0xff;
    sip.round(), sip.round(), sip.round(), sip.round();
    return sip.a ^ sip.b ^ sip.c ^ sip.d;
}

}  // namespace
