// The calls of layers, one after another, with no Python between them: `specnb.replayed` records them.
//
// All threads run through the calls together. The compiler's own kernels are left to one of them; ours are shared out.
// Every argument is the sum of a number that changes from call to call (where a tensor lies, how many slots there are)
// and one that does not (how far into the tensor).

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

constexpr int MOST = 24; // arguments of a call

// An argument as a function takes it: an address, a whole number, or the bits of a float.
template <class A> A argument(int64_t word) {
    if constexpr (std::is_pointer_v<A>) {
        return reinterpret_cast<A>(word);
    } else if constexpr (std::is_floating_point_v<A>) {
        float f;
        std::memcpy(&f, &word, sizeof f);
        return f;
    } else {
        return A(word);
    }
}

template <class... A, size_t... I>
void spread(void (*function)(A...), const int64_t *words, std::index_sequence<I...>) {
    function(argument<A>(words[I])...);
}

// A function of ours, with its arguments from words.
template <class... A> void spread(void (*function)(A...), const int64_t *words) {
    static_assert(sizeof...(A) <= MOST);
    spread(function, words, std::index_sequence_for<A...>{});
}

template <size_t> using Address = void *;

template <size_t... I> void call_with(int64_t function, const int64_t *words, std::index_sequence<I...>) {
    spread(reinterpret_cast<void (*)(Address<I>...)>(function), words);
}

// A function that takes `count` addresses.
template <int N = MOST> void call(int64_t function, const int64_t *words, int64_t count) {
    if constexpr (N > 0) {
        if (count == N)
            call_with(function, words, std::make_index_sequence<N>{});
        else
            call<N - 1>(function, words, count);
    }
}

enum Kind { ADDRESSES, ALONE, SHARED }; // the compiler's; ours for one thread; ours for all of them

// One of a team of threads that go through the calls together.
static void run(const int64_t *program, long length, const int64_t *bases) {
    for (const int64_t *at = program; at < program + length;) {
        const int64_t function = at[0], kind = at[1], count = at[2];
        int64_t words[MOST];
        at += 3;
        for (int64_t i = 0; i < count; i++, at += 2)
            words[i] = bases[at[0]] + at[1];
        const auto ours = reinterpret_cast<void (*)(const int64_t *)>(function);
        if (kind == SHARED) {
            ours(words);
        } else {
#pragma omp single
            {
                if (kind == ALONE)
                    ours(words);
                else
                    call(function, words, count);
            }
        }
    }
}

// program: of each call the function, its kind and the number of arguments; then of each argument which base, and what
// is added. It is run once for each layer, whose bases are the next `numbers` of them.
extern "C" void replay(const int64_t *program, long length, const int64_t *bases, long numbers, int layers,
                       int threads) {
#pragma omp parallel num_threads(threads)
    for (int layer = 0; layer < layers; layer++)
        run(program, length, bases + layer * numbers);
}
