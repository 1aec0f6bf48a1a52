// Sums of elements, added in place: a[i] += b[i]. 16-bit floats in single precision, rounded to nearest, ties to even.

#pragma once

#include <cstdint>
#include <cstring>

// The wide instructions of the machine it runs on, not of the one that compiled it.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx2", "default")))
#else
#define CLONED
#endif

namespace {

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct Half {
    static float widen(uint16_t half) {
        uint32_t magnitude = (half & 0x7fffu) << 13, exponent = magnitude & 0x0f800000u;
        uint32_t normal = magnitude + (112u << 23), infinite = magnitude | 0x7f800000u;
        // A subnormal: its mantissa behind 2^-14, which is then taken away.
        uint32_t small = bits_of(float_of(magnitude | 113u << 23) - 0x1p-14f);
        uint32_t bits = exponent == 0 ? small : exponent == 0x0f800000u ? infinite : normal;
        return float_of(bits | (half & 0x8000u) << 16);
    }
    static uint16_t round(float value) {
        uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u;
        bits &= 0x7fffffffu;
        uint32_t large = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
        // Added to 0.5, a subnormal's bits end up in the last place, rounded by the addition.
        uint32_t small = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
        uint32_t normal = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
        return sign | (bits >= 143u << 23 ? large : bits < 113u << 23 ? small : normal);
    }
};

struct Brain {
    static float widen(uint16_t brain) { return float_of(uint32_t(brain) << 16); }
    static uint16_t round(float value) {
        uint32_t bits = bits_of(value);
        uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded;
    }
};

#define ADD(name, type, expression)                                                       \
    CLONED void name(void* into, const void* more, int64_t count) {                       \
        type* __restrict__ a = static_cast<type*>(into);                                  \
        const type* __restrict__ b = static_cast<const type*>(more);                      \
        for (int64_t i = 0; i < count; ++i) a[i] = (expression);                          \
    }

ADD(add_float32, float, a[i] + b[i])
ADD(add_float64, double, a[i] + b[i])
ADD(add_float16, uint16_t, Half::round(Half::widen(a[i]) + Half::widen(b[i])))
ADD(add_bfloat16, uint16_t, Brain::round(Brain::widen(a[i]) + Brain::widen(b[i])))
ADD(add_int32, uint32_t, a[i] + b[i])  // unsigned: a sum too large wraps, as NumPy's does
ADD(add_int64, uint64_t, a[i] + b[i])
ADD(add_uint8, uint8_t, uint8_t(a[i] + b[i]))

#define SCALE(name, type, expression)                                                     \
    void name(void* values, float by, int64_t count) {                                    \
        type* a = static_cast<type*>(values);                                             \
        for (int64_t i = 0; i < count; ++i) a[i] = (expression);                          \
    }

SCALE(scale_float32, float, a[i] * by)
SCALE(scale_float64, double, a[i] * double(by))
SCALE(scale_float16, uint16_t, Half::round(Half::widen(a[i]) * by))
SCALE(scale_bfloat16, uint16_t, Brain::round(Brain::widen(a[i]) * by))

struct Kind {
    int64_t item;
    void (*add)(void*, const void*, int64_t);
    void (*scale)(void*, float, int64_t);  // of floats
};

// In the order of plan.KINDS.
const Kind kinds[] = {{4, add_float32, scale_float32}, {8, add_float64, scale_float64},
                      {2, add_float16, scale_float16}, {2, add_bfloat16, scale_bfloat16},
                      {4, add_int32, nullptr},         {8, add_int64, nullptr},
                      {1, add_uint8, nullptr}};

}  // namespace
