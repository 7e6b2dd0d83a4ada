/* Loss and gradient, or the whole step, of a chain of linear layers with ReLU between them, under the cross-entropy.

   The equations are in local/kernels/linear.py. A batch of ten rows is far too small for the matrix products of a
   library: here a vector of weights is read once for all rows of a tile, and the step changes it as soon as its
   gradient is known. REAL is float or double. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#define BYTES 64
enum { ROWS = 5, OUTPUTS = 5, STRIPE = 5, VECTORS = 5 }; /* tiles that fit into 32 registers */
#else
#define BYTES 32
enum { ROWS = 5, OUTPUTS = 2, STRIPE = 6, VECTORS = 2 }; /* and into 16 */
#endif

typedef REAL vector __attribute__((vector_size(BYTES)));
typedef REAL anywhere __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
enum { LANES = BYTES / sizeof(REAL), IGNORED = -100 };

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* The first `count` numbers, and zeros in the other lanes. */
INLINE vector load(const REAL *from, long count)
{
    if (count == LANES) return *(const anywhere *)from;
#ifdef __AVX512F__
    if (sizeof(REAL) == 4) return (vector)_mm512_maskz_loadu_ps((1u << count) - 1, from);
    return (vector)_mm512_maskz_loadu_pd((1u << count) - 1, from);
#else
    vector x = {};
    memcpy(&x, from, count * sizeof(REAL));
    return x;
#endif
}

INLINE void store(REAL *to, vector x, long count)
{
    if (count == LANES) {
        *(anywhere *)to = x;
        return;
    }
#ifdef __AVX512F__
    if (sizeof(REAL) == 4) _mm512_mask_storeu_ps(to, (1u << count) - 1, (__m512)x);
    else _mm512_mask_storeu_pd(to, (1u << count) - 1, (__m512d)x);
#else
    memcpy(to, &x, count * sizeof(REAL));
#endif
}

INLINE vector everywhere(REAL x) { return x - (vector){}; }

INLINE REAL total(vector x)
{
#ifdef __AVX512F__
    if (sizeof(REAL) == 4) return _mm512_reduce_add_ps((__m512)x);
    return _mm512_reduce_add_pd((__m512d)x);
#else
    REAL sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
#endif
}

/* z = h Wᵀ + b for a tile of rows and outputs; NaN stays NaN in the ReLU, as in torch. */
INLINE void forward_tile(const int rows, const int outputs, long in, long out, const REAL *h, const REAL *w,
                         const REAL *b, REAL *z, int rectify)
{
    vector sums[ROWS][OUTPUTS] = {};
    long full = in - in % LANES;
    for (long i = 0; i < in; i += LANES) {
        long count = i < full ? LANES : in - full;
        vector inputs[ROWS];
        UNROLL for (int r = 0; r < rows; r++) inputs[r] = load(h + r * in + i, count);
        UNROLL for (int o = 0; o < outputs; o++) {
            vector weights = load(w + o * in + i, count);
            UNROLL for (int r = 0; r < rows; r++) sums[r][o] += inputs[r] * weights;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int o = 0; o < outputs; o++) {
        REAL y = total(sums[r][o]) + (b ? b[o] : 0);
        z[r * out + o] = rectify && y < 0 ? 0 : y;
    }
}

static void forward(long n, long in, long out, const REAL *h, const REAL *w, const REAL *b, REAL *z, int rectify)
{
    long whole = n - n % ROWS, o = 0;
    for (; o + OUTPUTS <= out; o += OUTPUTS) {
        const REAL *bias = b ? b + o : 0;
        for (long s = 0; s < whole; s += ROWS)
            forward_tile(ROWS, OUTPUTS, in, out, h + s * in, w + o * in, bias, z + s * out + o, rectify);
        for (long s = whole; s < n; s++)
            forward_tile(1, OUTPUTS, in, out, h + s * in, w + o * in, bias, z + s * out + o, rectify);
    }
    for (; o < out; o++)
        for (long s = 0; s < n; s++)
            forward_tile(1, 1, in, out, h + s * in, w + o * in, b ? b + o : 0, z + s * out + o, rectify);
}

/* Replaces the logits z of a batch by δ = share · (softmax(z) − y) and returns its loss. */
static REAL cross_entropy(long n, long classes, REAL *z, const int64_t *labels, const REAL *shares)
{
    REAL loss = 0, counted = 0;
    for (long s = 0; s < n; s++) counted += labels[s] != IGNORED;
    for (long s = 0; s < n; s++, z += classes) {
        if (labels[s] == IGNORED) {
            memset(z, 0, classes * sizeof(REAL));
            continue;
        }
        REAL share = shares ? shares[s] : 1 / counted, top = z[0], sum = 0;
        for (long c = 1; c < classes; c++) top = z[c] > top ? z[c] : top;
        REAL right = z[labels[s]] - top;
        for (long c = 0; c < classes; c++) sum += z[c] = sizeof(REAL) == 4 ? expf(z[c] - top) : exp(z[c] - top);
        loss += share * ((sizeof(REAL) == 4 ? logf(sum) : log(sum)) - right);
        for (long c = 0; c < classes; c++) z[c] = share * (z[c] / sum - (c == labels[s]));
    }
    return counted ? loss : NAN;
}

/* to = δ W ⊙ [h > 0] for a tile of rows and vectors of inputs. */
INLINE void backward_tile(const int rows, const int vectors, long count, long in, long out, const REAL *delta,
                          const REAL *w, const REAL *h, REAL *to)
{
    vector sums[ROWS][VECTORS] = {};
    for (long o = 0; o < out; o++) {
        vector weights[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) weights[v] = load(w + o * in + v * LANES, count);
        UNROLL for (int r = 0; r < rows; r++) {
            vector slope = everywhere(delta[r * out + o]);
            UNROLL for (int v = 0; v < vectors; v++) sums[r][v] += slope * weights[v];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) {
        vector activation = load(h + r * in + v * LANES, count);
        __typeof__(activation <= 0) inactive = activation <= 0;
        store(to + r * in + v * LANES, (vector)((__typeof__(inactive))sums[r][v] & ~inactive), count);
    }
}

INLINE void backward_rows(const int rows, long in, long out, const REAL *delta, const REAL *w, const REAL *h, REAL *to)
{
    long i = 0;
    for (; i + VECTORS * LANES <= in; i += VECTORS * LANES)
        backward_tile(rows, VECTORS, LANES, in, out, delta, w + i, h + i, to + i);
    for (; i + LANES <= in; i += LANES) backward_tile(rows, 1, LANES, in, out, delta, w + i, h + i, to + i);
    if (i < in) backward_tile(rows, 1, in - i, in, out, delta, w + i, h + i, to + i);
}

static void backward(long n, long in, long out, const REAL *delta, const REAL *w, const REAL *h, REAL *to)
{
    long s = 0;
    for (; s + ROWS <= n; s += ROWS) backward_rows(ROWS, in, out, delta + s * out, w, h + s * in, to + s * in);
    for (; s < n; s++) backward_rows(1, in, out, delta + s * out, w, h + s * in, to + s * in);
}

/* to = keep · from + δᵀ h for a tile of outputs and vectors of inputs; without `from`, δᵀ h alone. */
INLINE void outer_tile(const int outputs, const int vectors, long count, long n, long in, long out, const REAL *delta,
                       const REAL *h, const REAL *from, REAL *to, REAL keep)
{
    vector sums[STRIPE][VECTORS] = {};
    if (from)
        UNROLL for (int o = 0; o < outputs; o++) UNROLL for (int v = 0; v < vectors; v++)
            sums[o][v] = keep * load(from + o * in + v * LANES, count);
    for (long s = 0; s < n; s++) {
        vector inputs[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) inputs[v] = load(h + s * in + v * LANES, count);
        UNROLL for (int o = 0; o < outputs; o++) {
            vector slope = everywhere(delta[s * out + o]);
            UNROLL for (int v = 0; v < vectors; v++) sums[o][v] += slope * inputs[v];
        }
    }
    UNROLL for (int o = 0; o < outputs; o++) UNROLL for (int v = 0; v < vectors; v++)
        store(to + o * in + v * LANES, sums[o][v], count);
}

INLINE void outer_stripe(const int outputs, long n, long in, long out, const REAL *delta, const REAL *h,
                         const REAL *from, REAL *to, REAL keep)
{
#define TILE(vectors, count) \
    outer_tile(outputs, vectors, count, n, in, out, delta, h + i, from ? from + i : 0, to + i, keep)
    long i = 0;
    for (; i + VECTORS * LANES <= in; i += VECTORS * LANES) TILE(VECTORS, LANES);
    for (; i + LANES <= in; i += LANES) TILE(1, LANES);
    if (i < in) TILE(1, in - i);
#undef TILE
}

static void outer(long n, long in, long out, const REAL *delta, const REAL *h, const REAL *from, REAL *to, REAL keep)
{
    long o = 0;
    for (; o + STRIPE <= out; o += STRIPE)
        outer_stripe(STRIPE, n, in, out, delta + o, h, from ? from + o * in : 0, to + o * in, keep);
    for (; o < out; o++) outer_stripe(1, n, in, out, delta + o, h, from ? from + o * in : 0, to + o * in, keep);
}

/* One client: weights ← keep · weights + rate · ∇, or with `gradient`: gradient = rate · ∇. Returns the loss. */
static REAL one(long layers, const long *widths, const int64_t *biased, REAL *weights, REAL *gradient, REAL keep,
                REAL rate, long n, const REAL *inputs, const int64_t *labels, const REAL *shares, REAL *scratch)
{
    const REAL *h[layers + 1];
    long starts[layers + 1];
    h[0] = inputs;
    starts[0] = 0;
    for (long l = 0; l < layers; l++) {
        long in = widths[l], out = widths[l + 1];
        const REAL *w = weights + starts[l];
        forward(n, in, out, h[l], w, biased[l] ? w + in * out : 0, scratch, l + 1 < layers);
        h[l + 1] = scratch;
        scratch += n * out;
        starts[l + 1] = starts[l] + in * out + biased[l] * out;
    }
    REAL *delta = (REAL *)h[layers];
    REAL loss = cross_entropy(n, widths[layers], delta, labels, shares);
    for (long l = layers - 1; l >= 0; l--) {
        long in = widths[l], out = widths[l + 1];
        REAL *w = weights + starts[l], *to = gradient ? gradient + starts[l] : w;
        if (l) backward(n, in, out, delta, w, h[l], scratch);
        for (long e = 0; e < n * out; e++) delta[e] *= rate;
        outer(n, in, out, delta, h[l], gradient ? 0 : w, to, keep);
        for (long o = 0; biased[l] && o < out; o++) {
            REAL sum = 0, *b = to + in * out + o;
            for (long s = 0; s < n; s++) sum += delta[s * out + o];
            *b = gradient ? sum : keep * *b + sum;
        }
        delta = scratch;
        scratch += n * in;
    }
    return loss;
}

/* The same for several clients, whose weights, gradients, samples and losses are the rows of contiguous arrays.

   widths: of the input and of the output of each layer; biased: whether each layer has a bias.
   shares: of the samples in their client's mean; 0 stands for 1 over the number of labels that are not IGNORED.
   scratch: n numbers for each hidden unit, twice, and for each class.
   Returns 0, or 1 without having changed anything if a label is not a class. */
int chain(long layers, const long *widths, const int64_t *biased, long clients, REAL *weights, REAL *gradients,
          REAL keep, REAL rate, long n, const REAL *inputs, const int64_t *labels, const REAL *shares, REAL *scratch,
          REAL *losses)
{
    long size = 0, classes = widths[layers];
    for (long l = 0; l < layers; l++) size += widths[l] * widths[l + 1] + biased[l] * widths[l + 1];
    for (long s = 0; s < clients * n; s++)
        if ((labels[s] < 0 || labels[s] >= classes) && (shares || labels[s] != IGNORED)) return 1;
    for (long c = 0; c < clients; c++)
        losses[c] = one(layers, widths, biased, weights + c * size, gradients ? gradients + c * size : 0, keep, rate,
                        n, inputs + c * n * widths[0], labels + c * n, shares ? shares + c * n : 0, scratch);
    return 0;
}
