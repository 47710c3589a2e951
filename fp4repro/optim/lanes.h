// NVFP4 on vectors whose lanes are blocks: what core/kernels.py computes, to the bit, sixteen blocks at once.
//
// Lane b of vector j is element j of block b. A block's scale is then a lane, its mean fifteen additions of
// vectors, its Hadamard transform sums and differences of them. Vectors are GCC's: any CPU will do.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define EACH _Pragma("GCC unroll 16") for (int j = 0; j < N; j++)

namespace {

constexpr int N = 16;           // elements of a block, lanes of a vector, blocks of a group
constexpr int32_t EXPONENT = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;

typedef float F __attribute__((vector_size(4 * N)));
typedef int32_t I __attribute__((vector_size(4 * N)));
typedef uint16_t H __attribute__((vector_size(2 * N)));
typedef uint8_t B __attribute__((vector_size(N)));

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
    for (int j = 0; j < N; j++) y[j] = std::sqrt(x[j]);
    return y;
}

// Swaps the off-diagonal squares of side STEP.
template <int STEP> inline void exchange(F *x) {
    I low, high;
    EACH low[j] = j & STEP ? N + j - STEP : j;
    EACH high[j] = j & STEP ? N + j : j + STEP;
    EACH if (!(j & STEP)) {
        F a = x[j], b = x[j + STEP];
        x[j] = __builtin_shuffle(a, b, low);
        x[j + STEP] = __builtin_shuffle(a, b, high);
    }
}
inline void transpose(F *x) { exchange<8>(x), exchange<4>(x), exchange<2>(x), exchange<1>(x); }

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

struct Decoder {
    I word[2];
    F s;
    float tensor;

    // `part` is a power of two that the caller wants the values multiplied by.
    Decoder(const Moment &t, float decode, float part) : tensor(decode * part) {
        I even, a = load<I>(t.codes), b = load<I>(t.codes + 64);
        EACH even[j] = 2 * j;
        word[0] = __builtin_shuffle(a, b, even);  // the first eight codes of each block
        word[1] = __builtin_shuffle(a, b, even + 1);
        s = from_e4m3(load<B>(t.scales));
    }
    F operator[](int j) const {
        const F table = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6};
        return __builtin_shuffle(table, word[j / 8] >> 4 * (j % 8)) * s * tensor;
    }
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
    EACH odd[j] = j / 2 + N * (j % 2);
    store(t.scales, __builtin_convertvector(s.code, B));
    store(t.codes, __builtin_shuffle(word[0], word[1], odd));
    store(t.codes + 64, __builtin_shuffle(word[0], word[1], odd + 8));
}

}  // namespace
