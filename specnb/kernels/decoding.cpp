// The two kernels of a decoding pass: linear layers for few rows, and attention over a ragged cache.
//
// linear: y = x · wᵀ for some rows x and weights that are read once, straight through. A pass over T positions
// multiplies T rows with every weight of the model. The weights come from memory, so the kernel's task is to keep them
// coming: they are packed in panels of 32 outputs, [N/32][K][32], which are read front to back with a prefetch ahead,
// and every weight meets all rows of a tile while it sits in a register.
//
// A row is summed over k = 0 … K-1 in that order, in float32, whatever rows are beside it: its result does not depend,
// bit for bit, on the number of rows, nor on the number of threads.
//
// attention: the query at slot s of a row sees the slots 0 … s of that row's cache (with a window, the last of them).
// Both products are the same panel kernel; a slot that is not seen has weight 0 and changes nothing, bit for bit. The
// tokens of a pass may belong to different rows of the cache: neighbours of one row are computed together.
//
// Both are made for a team of threads that calls them together: the entries at the end form one, or `replay` does.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "replay.h"

constexpr int PANEL = 32;   // outputs side by side: two vectors of 16
constexpr int HALF = PANEL / 2;
constexpr int AHEAD = 8192; // bytes between what is multiplied and what is being fetched
constexpr int SECOND = 2;   // into the second level of cache: the first can wait for far fewer lines at a time

#if defined(__AVX512F__)
constexpr int TILE = 12;    // 24 accumulators in 32 registers
#elif defined(__aarch64__)
constexpr int TILE = 2;     // 16 accumulators of 4 floats in 32 registers
#else
constexpr int TILE = 2;     // 8 accumulators of 8 floats in 16 registers
#endif

typedef float Floats __attribute__((vector_size(4 * HALF)));
typedef uint32_t Words __attribute__((vector_size(4 * HALF)));
typedef int32_t Ints __attribute__((vector_size(4 * HALF)));

struct Pair {
    Floats low, high; // outputs 0 … 15 and 16 … 31 of the panel
};

// Two bfloat16 share a word: output i in its lower half, output 16 + i in its upper one. bfloat16 is the upper half
// of a float32, so a shift or a mask is the whole conversion.
struct BFloat16 {
    typedef uint16_t Value;
    typedef uint32_t Unit; // what the packed weights are made of, and how many make a step of 32 outputs
    static constexpr int UNITS = HALF;
    static float widen(uint16_t v) {
        uint32_t word = uint32_t(v) << 16;
        float f;
        std::memcpy(&f, &word, 4);
        return f;
    }
    static uint16_t narrow(float f) { // round to nearest, ties to even
        uint32_t word;
        std::memcpy(&word, &f, 4);
        if (f != f)
            return uint16_t((word >> 16) | 0x40);
        return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
    }
    static Pair load(const Unit *step) {
        Words words;
        std::memcpy(&words, step, sizeof words);
        return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
    }
};

struct Float32 {
    typedef float Value;
    typedef float Unit;
    static constexpr int UNITS = PANEL;
    static float widen(float v) { return v; }
    static float narrow(float f) { return f; }
    static Pair load(const Unit *step) {
        Pair pair;
        std::memcpy(&pair.low, step, sizeof pair.low);
        std::memcpy(&pair.high, step + HALF, sizeof pair.high);
        return pair;
    }
};

// One panel of 32 outputs for M rows, summed over K steps of the weights, which lie `stride` values apart. The rows lie
// across (x [K][lead], one value of each row side by side) or along (x [M][lead]). y: [M][32].
template <class T, bool ALONG, int M>
void panel(const typename T::Unit *w, long stride, const float *x, long lead, int K, float *y) {
    Floats low[M], high[M];
    for (int m = 0; m < M; m++)
        low[m] = high[m] = Floats{};
    for (int k = 0; k < K; k++) {
        const typename T::Unit *step = w + k * stride;
        __builtin_prefetch((const char *)step + AHEAD, 0, SECOND);
        if (sizeof(typename T::Unit) * T::UNITS > 64)
            __builtin_prefetch((const char *)step + AHEAD + 64, 0, SECOND);
        const Pair weights = T::load(step);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            const float value = ALONG ? x[m * lead + k] : x[k * lead + m];
            low[m] += value * weights.low;
            high[m] += value * weights.high;
        }
    }
    for (int m = 0; m < M; m++) {
        std::memcpy(y + m * PANEL, &low[m], sizeof low[m]);
        std::memcpy(y + m * PANEL + HALF, &high[m], sizeof high[m]);
    }
}

// The panel for `count` ≤ TILE rows: the number of rows is a constant in each of its copies.
template <class T, bool ALONG, int M = TILE>
void tile(int count, const typename T::Unit *w, long stride, const float *x, long lead, int K, float *y) {
    if constexpr (M > 0) {
        if (count == M)
            panel<T, ALONG, M>(w, stride, x, lead, K, y);
        else
            tile<T, ALONG, M - 1>(count, w, stride, x, lead, K, y);
    }
}

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int padded(int n) { return (n + PANEL - 1) / PANEL * PANEL; }

// x [M, K], w packed, bias [N] or null, y [M, N]; scratch: M · K floats, x tile by tile: [K][rows of the tile].
template <class T>
void linear(const typename T::Value *x, const typename T::Unit *w, const float *bias, typename T::Value *y, float *scratch,
            int M, int N, int K) {
#pragma omp for collapse(2) schedule(static)
    for (int row = 0; row < M; row += TILE)
        for (int part = 0; part < K; part += 64) {
            const int height = least(TILE, M - row), end = least(part + 64, K);
            for (int k = part; k < end; k++)
                for (int m = 0; m < height; m++)
                    scratch[(long)row * K + k * height + m] = T::widen(x[(long)(row + m) * K + k]);
        }
#pragma omp for schedule(static)
    for (int first = 0; first < N; first += PANEL)
        for (int row = 0; row < M; row += TILE) {
            const int height = least(TILE, M - row), width = least(PANEL, N - first);
            float sums[TILE * PANEL];
            tile<T, false>(height, w + (long)first / PANEL * K * T::UNITS, T::UNITS, scratch + (long)row * K, height, K,
                           sums);
            for (int m = 0; m < height; m++)
                for (int n = 0; n < width; n++)
                    y[(long)(row + m) * N + first + n] =
                        T::narrow(sums[m * PANEL + n] + (bias ? bias[first + n] : 0.0f));
        }
}

// exp for x ≤ 0, to float32 precision: 2^n · e^r with |r| ≤ ln 2 / 2; below -87 it is 0.
static inline Floats exp_of(Floats x) {
    const Ints seen = x > -87.0f;
    x = (Floats)((Words)x & (Words)seen);
    const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
    const Floats whole = __builtin_convertvector(n, Floats);
    const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats e = r * 1.9875691500e-4f + 1.3981999507e-3f;
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * r * r + r + 1.0f;
    const Words power = (Words)(n + 127) << 23;
    return (Floats)((Words)(e * (Floats)power) & (Words)seen);
}

// A token's slot in the cache, the row of the cache it belongs to, and what it sees there: all slots before `before`, and
// slot before + i where bit i is set. In a chain that is before = slot + 1 and no bit; in a tree the bits are the token's
// ancestors since the root, in the order of their positions, and itself.
struct Place {
    int64_t slot, row, before;
    uint64_t ahead;
    int position() const { return int(before) + __builtin_popcountll(ahead) - 1; }
};

// Attention of T neighbours that belong to one row of the cache. The T queries of all heads that share a key/value head
// are the columns of that head: `columns` of them, `lead` with padding.
//   q [heads, step, D], of which T tokens; keys, values [kv_heads, capacity, D]; places [T]; out [T, heads, D]
struct Shape {
    int heads, kv_heads, T, D, capacity, window;
    float scale;
    int step;                       // tokens of a head in q, these T among them
    int seen, columns, lead, width; // slots seen, columns, both rounded up to panels: columns and D

    Shape(int heads, int kv_heads, int T, int D, int capacity, int window, float scale, int step)
        : heads(heads), kv_heads(kv_heads), T(T), D(D), capacity(capacity), window(window), scale(scale), step(step),
          seen(0), columns(heads / kv_heads * T), lead(padded(columns)), width(padded(D)) {}
    long of_queries() const { return (long)lead * D; }
    long of_keys() const { return (long)seen * D; }
    long of_values() const { return (long)seen * width; }
    long of_scores() const { return (long)seen * lead; }
};

// Queries of one key/value head as weights: [lead/32][D][32].
template <class T> void arrange(const typename T::Value *q, float *panels, const Shape &s) {
    for (int c = 0; c < s.lead; c++) {
        const typename T::Value *query = q + ((long)(c / s.T) * s.step + c % s.T) * s.D;
        float *column = panels + (long)c / PANEL * s.D * PANEL + c % PANEL;
        for (int d = 0; d < s.D; d++)
            column[d * PANEL] = c < s.columns ? T::widen(query[d]) * s.scale : 0.0f;
    }
}

// Slots first … first + count - 1 of one head: widened, and the scores of all columns, [seen][lead].
template <class T>
void score(const typename T::Value *keys, const typename T::Value *values, const float *queries, float *wide_keys,
           float *wide_values, float *scores, const Shape &s, int first, int count) {
    for (long i = (long)first * s.D; i < (long)(first + count) * s.D; i++)
        wide_keys[i] = T::widen(keys[i]);
    for (int j = first; j < first + count; j++) {
        float *line = wide_values + (long)j * s.width;
        for (int d = 0; d < s.D; d++)
            line[d] = T::widen(values[(long)j * s.D + d]);
        for (int d = s.D; d < s.width; d++)
            line[d] = 0.0f;
    }
    for (int c = 0; c < s.lead; c += PANEL) {
        float sums[TILE * PANEL];
        tile<Float32, true>(count, queries + (long)c * s.D, PANEL, wide_keys + (long)first * s.D, s.D, s.D, sums);
        for (int m = 0; m < count; m++)
            std::memcpy(scores + (long)(first + m) * s.lead + c, sums + m * PANEL, sizeof(float) * PANEL);
    }
}

// What 16 columns see: slots first … before - 1, and those whose bit is set.
struct Sight {
    Ints first = {}, before = {};
    Words low = {}, high = {};
    int trees; // the first slot that bits are about

    Sight(const Place *places, const Shape &s, int column) : trees(s.seen) {
        for (int i = 0; i < HALF && column + i < s.columns; i++) {
            const Place &place = places[(column + i) % s.T];
            const int position = place.position();
            uint64_t ahead = place.ahead;
            before[i] = int(place.before);
            first[i] = s.window && position >= s.window ? position - s.window + 1 : 0;
            for (int seen = __builtin_popcountll(ahead); s.window && seen > s.window; seen--)
                ahead &= ahead - 1; // the oldest ancestor
            low[i] = uint32_t(ahead), high[i] = uint32_t(ahead >> 32);
            trees = ahead ? least(trees, before[i]) : trees;
        }
    }
    Ints operator()(int j) const {
        const Ints plain = (j >= first) & (j < before);
        if (j < trees)
            return plain;
        const Ints bit = j - before;
        const Words shift = (Words)(bit & 31);
        const Ints set = -(Ints)((((bit < 32) ? low : high) >> shift) & 1);
        return plain | ((bit >= 0) & (bit < 64) & set);
    }
};

// 16 columns of scores become weights: they sum to 1 over the slots a column sees, and are 0 elsewhere. A column that sees
// a NaN, or an infinity on top, is all NaN, as in the quotient it stands for.
static void softmax(float *scores, const Place *places, const Shape &s, int column) {
    const Sight sees(places, s, column);
    Floats most = Floats{} - INFINITY, total = {}, at;
    for (int j = 0; j < s.seen; j++) {
        std::memcpy(&at, scores + (long)j * s.lead + column, sizeof at);
        const Ints better = (at > most) & sees(j);
        most = (Floats)(((Words)at & (Words)better) | ((Words)most & ~(Words)better));
    }
    for (int j = 0; j < s.seen; j++) {
        std::memcpy(&at, scores + (long)j * s.lead + column, sizeof at);
        at -= most;
        const Words bad = (Words)(at != at); // all bits set are a NaN
        at = (Floats)(((Words)exp_of(at) | bad) & (Words)sees(j));
        total += at;
        std::memcpy(scores + (long)j * s.lead + column, &at, sizeof at);
    }
    const Floats share = 1.0f / (total + (Floats)((Words)(total == 0.0f) & (Words)(Floats{} + 1.0f)));
    for (int j = 0; j < s.seen; j++) {
        std::memcpy(&at, scores + (long)j * s.lead + column, sizeof at);
        at *= share;
        std::memcpy(scores + (long)j * s.lead + column, &at, sizeof at);
    }
}

// Up to TILE columns from `column` on, outputs `part` … part + 31 of them.
template <class T>
void mix(const float *weights, const float *values, typename T::Value *out, const Shape &s, int head, int column, int part) {
    const int count = least(TILE, s.columns - column), some = least(PANEL, s.D - part);
    float sums[TILE * PANEL];
    tile<Float32, false>(count, values + part, s.width, weights + column, s.lead, s.seen, sums);
    for (int m = 0; m < count; m++) {
        const int c = column + m, h = head * (s.heads / s.kv_heads) + c / s.T;
        for (int d = 0; d < some; d++)
            out[((long)(c % s.T) * s.heads + h) * s.D + part + d] = T::narrow(sums[m * PANEL + d]);
    }
}

// All heads of T neighbours.
template <class T>
void attention(const typename T::Value *q, const typename T::Value *keys, const typename T::Value *values,
               const Place *places, typename T::Value *out, float *scratch, Shape s) {
    for (int t = 0; t < s.T; t++)
        s.seen = places[t].slot >= s.seen ? int(places[t].slot) + 1 : s.seen;
    float *queries = scratch, *wide_keys = queries + s.kv_heads * s.of_queries();
    float *wide_values = wide_keys + s.kv_heads * s.of_keys(), *scores = wide_values + s.kv_heads * s.of_values();
    const long head_size = (long)s.capacity * s.D;
#pragma omp for schedule(static)
    for (int h = 0; h < s.kv_heads; h++)
        arrange<T>(q + (long)h * (s.heads / s.kv_heads) * s.step * s.D, queries + h * s.of_queries(), s);
#pragma omp for collapse(2) schedule(static)
    for (int h = 0; h < s.kv_heads; h++)
        for (int j = 0; j < s.seen; j += TILE)
            score<T>(keys + h * head_size, values + h * head_size, queries + h * s.of_queries(),
                     wide_keys + h * s.of_keys(), wide_values + h * s.of_values(), scores + h * s.of_scores(), s, j,
                     least(TILE, s.seen - j));
#pragma omp for collapse(2) schedule(static)
    for (int h = 0; h < s.kv_heads; h++)
        for (int c = 0; c < s.columns; c += HALF)
            softmax(scores + h * s.of_scores(), places, s, c);
#pragma omp for collapse(3) schedule(static)
    for (int h = 0; h < s.kv_heads; h++)
        for (int c = 0; c < s.columns; c += TILE)
            for (int d = 0; d < s.D; d += PANEL)
                mix<T>(scores + h * s.of_scores(), wide_values + h * s.of_values(), out, s, h, c, d);
}

// q [R, heads, T, D]; keys, values [B, kv_heads, capacity, D]; places [R][T]; out [R, T, heads, D]. Runs of neighbours
// that belong to one row are shared out among the threads, or one after the other is done by all of them if there are
// few. scratch: so many floats for each thread. starts: room for R · T numbers.
template <class T>
void attention_of_rows(const typename T::Value *q, const typename T::Value *keys, const typename T::Value *values,
                       const Place *places, typename T::Value *out, float *scratch, long floats, int *starts, int R,
                       int heads, int kv_heads, int length, int D, int capacity, int window, float scale) {
    const auto begins = [&](int i) { return i % length == 0 || places[i].row != places[i - 1].row; };
    int runs = 0;
    for (int i = 0; i < R * length; i++)
        runs += begins(i);
#pragma omp single
    for (int i = 0, run = 0; i < R * length; i++)
        if (begins(i))
            starts[run++] = i;
    const auto of_run = [&](int run, float *own) {
        const int start = starts[run], end = run + 1 < runs ? starts[run + 1] : R * length;
        const int r = start / length, first = start % length;
        const long cached = places[start].row * kv_heads * (long)capacity * D;
        const Shape s(heads, kv_heads, end - start, D, capacity, window, scale, length);
        attention<T>(q + ((long)r * heads * length + first) * D, keys + cached, values + cached, places + start,
                     out + (long)start * heads * D, own, s);
    };
    if (runs < 2 * omp_get_num_threads()) {
        for (int run = 0; run < runs; run++)
            of_run(run, scratch);
        return;
    }
    float *own = scratch + omp_get_thread_num() * floats;
#pragma omp for schedule(dynamic)
    for (int run = 0; run < runs; run++) {
#pragma omp parallel num_threads(1) // a team of its own
        of_run(run, own);
    }
}

// New keys or values [R, heads, T, bytes], whose rows, heads and tokens lie so many bytes apart, go to their places
// [R][T] in a cache [B, heads, capacity, bytes].
extern "C" void store(const char *fresh, char *cache, const Place *places, long row_step, long head_step, long token_step,
                      int R, int heads, int T, int capacity, int bytes) {
    for (int r = 0; r < R; r++)
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < T; t++) {
                const Place &place = places[(long)r * T + t];
                std::memcpy(cache + ((place.row * heads + h) * (long)capacity + place.slot) * bytes,
                            fresh + r * row_step + h * head_step + t * token_step, bytes);
            }
}

// [R, heads, T, bytes], whose rows, heads and tokens lie so many bytes apart, without gaps.
static void gather(const char *x, char *out, long row_step, long head_step, long token_step, int R, int heads, int T,
                   int bytes) {
    for (int r = 0; r < R; r++)
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < T; t++)
                std::memcpy(out + ((long)(r * heads + h) * T + t) * bytes,
                            x + r * row_step + h * head_step + t * token_step, bytes);
}

// Ask for large pages for memory that nobody has written to yet: fewer addresses to look up while weights stream by.
extern "C" void large_pages(void *start, long bytes) {
#ifdef MADV_HUGEPAGE
    madvise(start, bytes, MADV_HUGEPAGE); // a wish: it may be refused
#else
    (void)start, (void)bytes;
#endif
}

extern "C" void replay_store(const int64_t *words) { spread(store, words); }
extern "C" void replay_gather(const int64_t *words) { spread(gather, words); }

#define ENTRIES(name, T)                                                                                               \
    extern "C" void linear_##name(const T::Value *x, const T::Unit *w, const float *bias, T::Value *y, float *scratch,  \
                                  int M, int N, int K, int threads) {                                                  \
        _Pragma("omp parallel num_threads(threads)") linear<T>(x, w, bias, y, scratch, M, N, K);                       \
    }                                                                                                                  \
    extern "C" void attention_##name(const T::Value *q, const T::Value *keys, const T::Value *values,                  \
                                     const Place *places, T::Value *out, float *scratch, long floats, int *starts,      \
                                     int R, int heads, int kv_heads, int length, int D, int capacity, int window,       \
                                     int threads, float scale) {                                                       \
        _Pragma("omp parallel num_threads(threads)")                                                                   \
            attention_of_rows<T>(q, keys, values, places, out, scratch, floats, starts, R, heads, kv_heads, length, D,  \
                                 capacity, window, scale);                                                             \
    }                                                                                                                  \
    extern "C" void replay_linear_##name(const int64_t *words) { spread(linear<T>, words); }                           \
    extern "C" void replay_attention_##name(const int64_t *words) { spread(attention_of_rows<T>, words); }

ENTRIES(bfloat16, BFloat16)
ENTRIES(float32, Float32)
