// One AdamW step of moments stored in NVFP4: to the bit what `buckets.make_step` computes in torch for the
// codecs FIRST_MOMENT and SECOND_MOMENT of recipes/optimizer.py, whatever the floor. Follows lanes.h.
//
// A code depends on the largest magnitude of its whole tensor, so there are two passes: one finds it, the next
// computes the same again, updates the parameters and stores. To compute twice is cheaper than to keep moments
// in FP32 between the passes, and takes no memory.

#include <vector>

namespace {

constexpr long CHUNK = 1024;  // blocks that a thread takes at a time
constexpr int AHEAD = 2;      // groups of N blocks whose memory is asked for in advance

struct Hyper {
    float keep, take1, beta2, take2, rate, unbias, eps;  // as in `buckets.make_step`
};

struct Bucket {
    Moment first, second;
    uint16_t *centre;  // (blocks,), BF16: means of the second moment's roots
    float floor;       // least decoded root over its block's mean
    Hyper h;

    Bucket at(long block) const { return {first.at(block), second.at(block), centre + block, floor, h}; }
};

// Blocks of one tensor, for one thread: `offset` in the tensor, `start` in the bucket.
struct Work {
    long tensor, offset, start, blocks;
    I largest[2];  // magnitudes by lane, as integers: a NaN is the largest
};

template <bool LAST>
void group(const Bucket &t, float *p, const float *grad, const float *decode, const float *amax, I *largest) {
    constexpr float part = 0.25f;
    const Hyper &h = t.h;
    F g[N], m[N], u[N], old_mean = from_bf16(load<H>(t.centre)), least = old_mean * t.floor;
    EACH g[j] = load<F>(grad + N * j);
    transpose(g);
    Decoder stored_u(t.second, decode[1], part), stored_m(t.first, decode[0], 1);
    EACH u[j] = stored_u[j];
    hadamard(u);
    I largest_m = {}, largest_u = {};
    EACH {  // the first moment's work keeps the processor busy while it takes roots
        F y = u[j] + old_mean, old = stored_m[j];
        y = y < least ? least : y;
        u[j] = root(y * y * h.beta2 + g[j] * g[j] * h.take2);
        m[j] = old + (g[j] - old) * h.take1;
        largest_m = most(largest_m, (I)m[j] & MAGNITUDE);
    }
    if (LAST) {
        F step[N];
        EACH step[j] = h.rate * m[j] / (u[j] * h.unbias + h.eps);
        encode(t.first, m, largest_m, amax[0], 1);
        transpose(step);
        EACH store(p + N * j, load<F>(p + N * j) * h.keep - step[j]);
    }
    H centre = to_bf16(mean(u));
    EACH u[j] -= from_bf16(centre);
    hadamard(u);
    EACH largest_u = most(largest_u, (I)u[j] & MAGNITUDE);
    if (LAST) {
        store(t.centre, centre);
        encode(t.second, u, largest_u, amax[1], part);
    }
    largest[0] = most(largest[0], largest_m);
    largest[1] = most(largest[1], largest_u);
}

void copy(const Bucket &to, const Bucket &from, long blocks) {
    std::memcpy(to.first.codes, from.first.codes, N / 2 * blocks);
    std::memcpy(to.second.codes, from.second.codes, N / 2 * blocks);
    std::memcpy(to.first.scales, from.first.scales, blocks);
    std::memcpy(to.second.scales, from.second.scales, blocks);
    std::memcpy(to.centre, from.centre, 2 * blocks);
}

// Less than a group of blocks: in a copy that is filled up with zeros.
template <bool LAST>
void rest(const Bucket &t, long blocks, float *p, const float *g, const float *decode, const float *amax,
          I *largest) {
    float own_p[N * N] = {}, own_g[N * N] = {};
    uint8_t codes[2][N * N / 2] = {}, scales[2][N] = {};
    uint16_t centre[N] = {};
    Bucket own = {{codes[0], scales[0], nullptr}, {codes[1], scales[1], nullptr}, centre, t.floor, t.h};
    copy(own, t, blocks);
    std::memcpy(own_p, p, 4 * N * blocks);
    std::memcpy(own_g, g, 4 * N * blocks);
    group<LAST>(own, own_p, own_g, decode, amax, largest);
    if (LAST) {
        copy(t, own, blocks);
        std::memcpy(p, own_p, 4 * N * blocks);
    }
}

template <bool LAST>
void run(Work &w, const Bucket &bucket, float *p, const float *g, const float *decode, const float *amax) {
    Bucket t = bucket.at(w.start);
    p += N * w.offset, g += N * w.offset;
    long left = w.blocks;
    for (; left >= N; left -= N, t = t.at(N), p += N * N, g += N * N) {
        for (int i = AHEAD * N; i < (AHEAD + 1) * N; i++) {
            __builtin_prefetch(g + N * i);
            if (LAST) __builtin_prefetch(p + N * i, 1);
        }
        group<LAST>(t, p, g, decode, amax, w.largest);
    }
    if (left) rest<LAST>(t, left, p, g, decode, amax, w.largest);
}

}  // namespace

extern "C" void adamw_step(long tensors, const long *blocks, float *const *p, const float *const *g,
                           const Bucket *bucket, int threads) {
    const Moment moments[2] = {bucket->first, bucket->second};
    std::vector<Work> work;
    std::vector<float> decode(2 * tensors), amax(2 * tensors);
    for (long k = 0, start = 0; k < tensors; start += blocks[k++]) {
        for (int i = 0; i < 2; i++) decode[2 * k + i] = tensor_decode(moments[i].amax[k]);
        for (long at = 0; at < blocks[k]; at += CHUNK)
            work.push_back({k, at, start + at, std::min(CHUNK, blocks[k] - at), {}});
    }
    auto pass = [&](auto function) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (Work &w : work) {
            long k = w.tensor;
            function(w, *bucket, p[k], g[k], &decode[2 * k], &amax[2 * k]);
        }
    };
    pass(run<false>);
    for (const Work &w : work)
        for (int i = 0; i < 2; i++) {
            int32_t found;
            std::memcpy(&found, &amax[2 * w.tensor + i], 4);
            EACH found = std::max(found, w.largest[i][j]);
            std::memcpy(&amax[2 * w.tensor + i], &found, 4);
        }
    for (long k = 0; k < 2 * tensors; k++) moments[k % 2].amax[k / 2] = amax[k] *= k % 2 ? 0.25f : 1;
    pass(run<true>);
}
