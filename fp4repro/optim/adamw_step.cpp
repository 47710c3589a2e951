// One AdamW step of moments stored in NVFP4: to the bit what `buckets.make_step` computes in torch for the
// codecs FIRST_MOMENT and SECOND_MOMENT of recipes/optimizer.py, whatever the floor. Follows lanes.h.
//
// A code depends on the largest magnitude of its whole tensor, so there are two passes. The first finds it, and
// keeps the new moments where they are few enough to stay in the processor's cache. Of more it keeps nothing:
// the second pass then computes the same again, which costs less than to write and read them, and no memory.

#include <vector>

namespace {

constexpr long CHUNK = 1024;  // blocks that a thread takes at a time
constexpr long FEW = 65536;   // blocks whose new moments are kept between the passes
constexpr int AHEAD = 2;      // groups of blocks whose memory is asked for in advance

struct Hyper {
    float keep, take1, beta2, take2, rate, unbias, eps;  // as in `buckets.make_step`
};

constexpr float part = 0.25f;  // of the Hadamard transform

struct Bucket {
    Moment first, second;
    uint16_t *centre;  // (blocks,), BF16: means of the second moment's roots
    float floor;       // least decoded root over its block's mean
    Hyper h;

    Bucket at(long block) const { return {first.at(block), second.at(block), centre + block, floor, h}; }
};

// Blocks of one tensor, for one thread: `offset` in the tensor, `start` in the bucket; its groups before it.
struct Work {
    long tensor, offset, start, blocks, groups;
    I largest[2];  // magnitudes by lane, as integers: a NaN is the largest
};

struct Kept {  // of a group
    F m[N], u[N];
    I largest_m, largest_u;
};

enum Pass { SEARCH, KEEP, STORE };

template <Pass PASS>
void group(const Bucket &t, float *p, const float *grad, const float *decode, const float *amax, I *largest,
           Kept *kept) {
    const Hyper &h = t.h;
    F g[N], m[N], u[N], old_mean = from_bf16(load<H>(t.centre)), least = old_mean * t.floor;
    EACH g[j] = load<F>(grad + spot(j));
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
    if (PASS != SEARCH) {
        F step[N];
        EACH step[j] = h.rate * m[j] / (u[j] * h.unbias + h.eps);
        if (PASS == STORE) encode(t.first, m, largest_m, amax[0], 1);
        if (PASS == KEEP) EACH kept->m[j] = m[j];
        transpose(step);
        EACH store(p + spot(j), load<F>(p + spot(j)) * h.keep - step[j]);
    }
    H centre = to_bf16(mean(u));
    EACH u[j] -= from_bf16(centre);
    hadamard(u);
    EACH largest_u = most(largest_u, (I)u[j] & MAGNITUDE);
    if (PASS != SEARCH) store(t.centre, centre);
    if (PASS == STORE) encode(t.second, u, largest_u, amax[1], part);
    if (PASS == KEEP) {
        EACH kept->u[j] = u[j];
        kept->largest_m = largest_m, kept->largest_u = largest_u;
    }
    largest[0] = most(largest[0], largest_m);
    largest[1] = most(largest[1], largest_u);
}

void copy(const Bucket &to, const Bucket &from, long blocks) {
    std::memcpy(to.first.codes, from.first.codes, N / 2 * blocks);
    std::memcpy(to.second.codes, from.second.codes, N / 2 * blocks);
    std::memcpy(to.first.scales, from.first.scales, blocks);
    std::memcpy(to.second.scales, from.second.scales, blocks);
    std::memmove(to.centre, from.centre, 2 * blocks);
}

// Less than a group of blocks: in a copy that is filled up with zeros.
template <Pass PASS>
void rest(const Bucket &t, long blocks, float *p, const float *g, const float *decode, const float *amax,
          I *largest, Kept *kept) {
    float own_p[W * N] = {}, own_g[W * N] = {};
    uint8_t codes[2][W * N / 2] = {}, scales[2][W] = {};
    uint16_t centre[W] = {};
    Bucket own = {{codes[0], scales[0], nullptr}, {codes[1], scales[1], nullptr}, centre, t.floor, t.h};
    copy(own, t, blocks);
    std::memcpy(own_p, p, 4 * N * blocks);
    std::memcpy(own_g, g, 4 * N * blocks);
    group<PASS>(own, own_p, own_g, decode, amax, largest, kept);
    if (PASS != SEARCH) {
        copy(t, own, blocks);
        std::memcpy(p, own_p, 4 * N * blocks);
    }
}

template <Pass PASS>
void run(Work &w, const Bucket &bucket, float *p, const float *g, const float *decode, const float *amax,
         Kept *kept) {
    Bucket t = bucket.at(w.start);
    p += N * w.offset, g += N * w.offset;
    long left = w.blocks;
    for (; left >= W; left -= W, t = t.at(W), p += W * N, g += W * N, kept++) {
        for (int i = AHEAD * W; i < (AHEAD + 1) * W; i++) {
            __builtin_prefetch(g + N * i);
            if (PASS != SEARCH) __builtin_prefetch(p + N * i, 1);
        }
        group<PASS>(t, p, g, decode, amax, w.largest, kept);
    }
    if (left) rest<PASS>(t, left, p, g, decode, amax, w.largest, kept);
}

// The second pass over what was kept.
void finish(Work &w, const Bucket &bucket, float *, const float *, const float *, const float *amax,
            Kept *kept) {
    Bucket t = bucket.at(w.start);
    for (long left = w.blocks; left > 0; left -= W, t = t.at(W), kept++) {
        uint8_t codes[2][W * N / 2], scales[2][W];
        Moment own[2] = {{codes[0], scales[0], nullptr}, {codes[1], scales[1], nullptr}};
        bool whole = left >= W;
        encode(whole ? t.first : own[0], kept->m, kept->largest_m, amax[0], 1);
        encode(whole ? t.second : own[1], kept->u, kept->largest_u, amax[1], part);
        if (!whole) copy(t, {own[0], own[1], t.centre, t.floor, t.h}, left);
    }
}

}  // namespace

extern "C" void adamw_step(long tensors, const long *blocks, float *const *p, const float *const *g,
                           const Bucket *bucket, int threads) {
    const Moment moments[2] = {bucket->first, bucket->second};
    std::vector<Work> work;
    std::vector<float> decode(2 * tensors), amax(2 * tensors);
    long groups = 0;
    for (long k = 0, start = 0; k < tensors; start += blocks[k++]) {
        for (int i = 0; i < 2; i++) decode[2 * k + i] = tensor_decode(moments[i].amax[k]);
        for (long at = 0; at < blocks[k]; at += CHUNK) {
            long count = std::min(CHUNK, blocks[k] - at);
            work.push_back({k, at, start + at, count, groups, {}});
            groups += (count + W - 1) / W;
        }
    }
    bool few = groups * W <= FEW;
    static thread_local std::vector<Kept> kept;  // for the next step too: fresh memory costs as much as a step
    if (few && long(kept.size()) < groups) kept.resize(groups);
    Kept *memory = few ? kept.data() : nullptr;
    auto pass = [&](auto function) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (size_t i = 0; i < work.size(); i++) {
            long k = work[i].tensor;
            function(work[i], *bucket, p[k], g[k], &decode[2 * k], &amax[2 * k], memory + work[i].groups);
        }
    };
    pass(few ? run<KEEP> : run<SEARCH>);
    for (const Work &w : work)
        for (int i = 0; i < 2; i++) {
            int32_t found;
            std::memcpy(&found, &amax[2 * w.tensor + i], 4);
            LANES found = std::max(found, w.largest[i][b]);
            std::memcpy(&amax[2 * w.tensor + i], &found, 4);
        }
    for (long k = 0; k < 2 * tensors; k++) moments[k % 2].amax[k / 2] = amax[k] *= k % 2 ? 0.25f : 1;
    pass(few ? finish : run<STORE>);
}
