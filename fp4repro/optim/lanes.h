// NVFP4 on vectors whose lanes are blocks: what core/kernels.py computes, to the bit, a group of blocks at once.
//
// Lane b of vector j is element j of block b. A block's scale is then a lane, its mean fifteen additions of
// vectors, its Hadamard transform sums and differences of them. Vectors are GCC's, as wide as the processor's:
// wider ones would be taken apart into single numbers.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define EACH _Pragma("GCC unroll 16") for (int j = 0; j < N; j++)
#define LANES for (int b = 0; b < W; b++)

namespace {

constexpr int N = 16;  // elements of a block
#if !defined(FP4REPRO_LANES)
#if defined(__AVX512F__)
#define FP4REPRO_LANES 16
#elif defined(__AVX2__)
#define FP4REPRO_LANES 8
#else
#define FP4REPRO_LANES 4
#endif
#endif
constexpr int W = FP4REPRO_LANES;  // lanes of a vector, blocks of a group
constexpr int32_t EXPONENT = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef uint8_t B __attribute__((vector_size(W)));

struct Moment {
    uint8_t *codes;   // (blocks, 8)
    uint8_t *scales;  // (blocks,), E4M3
    float *amax;      // (tensors,)

    Moment at(long block) const { return {codes + N / 2 * block, scales + block, amax}; }
};

template <class V, class T> inline V load(const T *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V, class T> inline void store(T *to, V v) { std::memcpy(to, &v, sizeof v); }

inline F splat(float x) { return x - F{}; }
inline I most(I a, I b) { return a > b ? a : b; }
inline F root(F x) {
    F y;
    for (int b = 0; b < W; b++) y[b] = std::sqrt(x[b]);
    return y;
}

// Swaps the off-diagonal squares of side STEP.
template <int STEP> inline void exchange(F *x) {
    I low, high;
    LANES low[b] = b & STEP ? W + b - STEP : b;
    LANES high[b] = b & STEP ? W + b : b + STEP;
    EACH if (!(j & STEP)) {
        F left = x[j], right = x[j + STEP];
        x[j] = __builtin_shuffle(left, right, low);
        x[j + STEP] = __builtin_shuffle(left, right, high);
    }
}
// Of each W rows; its own inverse.
inline void transpose(F *x) {
    if constexpr (W > 8) exchange<8>(x);
    if constexpr (W > 4) exchange<4>(x);
    exchange<2>(x), exchange<1>(x);
}
// Where row j of a group lies in memory, before the transposition: columns j / W * W and on of block j % W.
constexpr int spot(int j) { return N * (j % W) + j / W * W; }

template <int HALF> inline void stage(F *x) {
    EACH if (!(j & HALF)) {
        F a = x[j], b = x[j + HALF];
        x[j] = a + b;
        x[j + HALF] = a - b;
    }
}
// Four times the orthonormal transform.
inline void hadamard(F *x) { stage<1>(x), stage<2>(x), stage<4>(x), stage<8>(x); }

inline F mean(const F *x) {
    F t[N];
    EACH t[j] = x[j];
    EACH if (j < 8) t[j] += t[j + 8];
    EACH if (j < 4) t[j] += t[j + 4];
    EACH if (j < 2) t[j] += t[j + 2];
    return (t[0] + t[1]) * (1.0f / N);
}

inline F from_bf16(H x) { return (F)(__builtin_convertvector(x, I) << 16); }
inline H to_bf16(F x) {
    I bits = (I)x;
    return __builtin_convertvector((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, H);
}
inline F from_e4m3(B bytes) {
    I word = __builtin_convertvector(bytes, I);
    return word < 8 ? __builtin_convertvector(word, F) * 0x1p-9f : (F)((word << 20) + (120 << 23));
}

// `kernels.tensor_scales`.
inline float tensor_encode(float amax) {
    float encode = std::min(2688.0f / amax, FLT_MAX);
    return amax == 0 || encode == 0 ? 1 : encode;
}
inline float tensor_decode(float amax) {
    return std::isfinite(amax) ? 1 / tensor_encode(amax) : std::numeric_limits<float>::quiet_NaN();
}

// To nearest on a grid whose first power of two is 2**LOWEST: beside a power of two that has the grid's
// spacing, the adder rounds, and the last bits of the sum are the code.
template <int MANTISSA, int LOWEST> struct Rounded {
    F big, sum;
    I code;
    explicit Rounded(I magnitude) {
        I field = most(magnitude & EXPONENT, I{} + ((LOWEST + 127) << 23));
        big = (F)(field + ((23 - MANTISSA) << 23));
        sum = (F)magnitude + big;
        code = (I)sum - field + (field >> (23 - MANTISSA)) - BIAS;
    }
    static constexpr int32_t BIAS = ((23 - MANTISSA) << 23) + ((LOWEST + 127) << MANTISSA);
};

inline F from_e2m1(I code) {
    if constexpr (W == N) {
        const float table[N] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6};
        return __builtin_shuffle(load<F>(table), code);
    }
    I word = code & 7, sign = (code & 8) << 28;
    F magnitude = word < 2 ? __builtin_convertvector(word, F) * 0.5f : (F)((word << 22) + (126 << 23));
    return (F)((I)magnitude | sign);
}

struct Decoder {
    I word[2];
    F s;
    float tensor;

    // `part` is a power of two that the caller wants the values multiplied by.
    Decoder(const Moment &t, float decode, float part) : tensor(decode * part) {
        I even, low = load<I>(t.codes), high = load<I>(t.codes + 4 * W);
        LANES even[b] = 2 * b;
        word[0] = __builtin_shuffle(low, high, even);  // the first eight codes of each block
        word[1] = __builtin_shuffle(low, high, even + 1);
        s = from_e4m3(load<B>(t.scales));
    }
    F operator[](int j) const { return from_e2m1(word[j / 8] >> 4 * (j % 8)) * s * tensor; }
};

// `kernels.make_scales` and `make_apply`. `part` is a power of two that the values still lack.
void encode(const Moment &t, const F *z, I largest, float amax, float part) {
    float decode = tensor_decode(amax);
    F wanted = (F)largest * part * (tensor_encode(amax) * (1.0f / 6));
    Rounded<3, -6> s((I)(wanted < 448 ? wanted : splat(448)));
    F e = 1 / ((s.sum - s.big) * (std::isnan(decode) ? 1 : decode));
    e = (e < FLT_MAX ? e : splat(FLT_MAX)) * part;
    I word[2] = {}, six = (I)splat(6), odd;
    EACH {
        F y = z[j] * e;
        I a = (I)y & MAGNITUDE, code = Rounded<1, 0>(a < six ? a : six).code;
        word[j / 8] += (y < 0 ? code + 8 : code) << 4 * (j % 8);
    }
    LANES odd[b] = b / 2 + W * (b % 2);
    store(t.scales, __builtin_convertvector(s.code, B));
    store(t.codes, __builtin_shuffle(word[0], word[1], odd));
    store(t.codes + 4 * W, __builtin_shuffle(word[0], word[1], odd + W / 2));
}

}  // namespace
