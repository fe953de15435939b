/* Steps of a few rows, as fast as the weights can be read: products, norms, and whole blocks of Llama's type.

   Every sum is taken in one order that does not depend on how many rows there are, so a row gets the same numbers alone
   and among others. Everything is float32 and dense; weights may be stored as bfloat16, and are widened when read.

   Shapes: n rows, D hidden, I MLP, H query heads, J key-value heads, E head size, P places in the cache. */

#include <omp.h>
#include <stdint.h>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define ROWS 8   /* that share what is read of a matrix */
#define NEAR 4096 /* numbers that stay in the nearest cache while matrices stream through it */
#define BLOCK 128 /* rows of a matrix that stay in a cache while rows of x pass */
#define MIXED (WIDTH > 8 ? 3 : 2) /* queries that share a value that was read */
#define ROW (WIDTH + CHUNK)
#define CHUNK 64 /* places whose scores are normalised together; a multiple of WIDTH */
#define WIDE (WIDTH > 8 ? 4 : 2) /* streams when many sums are wanted: fewer where there are half as many registers */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

/* Holds a value in a register, where compilers would rather read it again for every use. */
#if defined(__AVX512F__)
#define KEEP(VALUE) __asm__("" : "+v"(VALUE))
#elif defined(__SSE2__)
#define KEEP(VALUE) __asm__("" : "+x"(VALUE))
#elif defined(__aarch64__)
#define KEEP(VALUE) __asm__("" : "+w"(VALUE))
#else
#define KEEP(VALUE)
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH), aligned(2)));
typedef float vec8 __attribute__((vector_size(32), aligned(4)));
typedef float vec4 __attribute__((vector_size(16), aligned(4)));

struct matrix { const void *weights; const float *bias; long inputs, outputs; int half; };
struct layer {
    const float *attention_norm, *q_norm, *k_norm, *mlp_norm; /* q_norm and k_norm may be NULL */
    struct matrix q, k, v, o, gate, up, down;
    float *keys, *values;
};
struct shape { long hidden, heads, kv_heads, head, rotated, inner, head_stride, place_stride; float eps; };

/* a b + c, rounded once where the processor can. Said here, as compilers, left to it (-ffp-contract), fuse the same sum
   for some numbers of rows and not for others: to them a chain of these is slow on some processors. */
INLINE vec fused(vec a, vec b, vec c)
{
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec spread(float one) { return one - (vec){0}; }

INLINE float total(vec sum)
{
    union { vec whole; vec8 eight[2]; vec4 four[4]; float one[16]; } parts;
    parts.whole = sum;
    if (WIDTH > 8) parts.eight[0] += parts.eight[1];
    if (WIDTH > 4) parts.four[0] += parts.four[1];
    return (parts.one[0] + parts.one[2]) + (parts.one[1] + parts.one[3]);
}

/* The same of WIDTH vectors at once, to one a lane: a step adds two halves of two vectors, lane I of `a` or of `b`. */
#define LOW(I, APART) ((I) & APART ? b[(I) & ~APART] : a[I])
#define HIGH(I, APART) ((I) & APART ? b[I] : a[(I) | APART])
#define FOUR(F, I, APART) F(I, APART), F(I + 1, APART), F(I + 2, APART), F(I + 3, APART)
#if WIDTH == 16
#define LANES(F, APART) (vec){FOUR(F, 0, APART), FOUR(F, 4, APART), FOUR(F, 8, APART), FOUR(F, 12, APART)}
#elif WIDTH == 8
#define LANES(F, APART) (vec){FOUR(F, 0, APART), FOUR(F, 4, APART)}
#else
#define LANES(F, APART) (vec){FOUR(F, 0, APART)}
#endif
#define ADD_HALVES(APART) UNROLL for (int i = 0; i < APART; i++) { \
    vec a = sum[i], b = sum[i + APART]; \
    sum[i] = LANES(LOW, APART) + LANES(HIGH, APART); \
}

INLINE vec totals(vec *sum)
{
#if WIDTH > 8
    ADD_HALVES(8)
#endif
#if WIDTH > 4
    ADD_HALVES(4)
#endif
    ADD_HALVES(2)
    ADD_HALVES(1)
    return sum[0];
}

INLINE vec read_vec(const void *weights, long at, int half)
{
    if (!half) return *(const vec *)((const float *)weights + at);
    return (vec)(__builtin_convertvector(*(const halves *)((const uint16_t *)weights + at), bits) << 16);
}

/* The first `count` < WIDTH numbers, and zeros. What is left of a row is summed like the rest of it: were it left to the
   compiler, it would round in one way for some numbers of rows and in another for others. */
INLINE vec read_some(const void *weights, long at, int half, long count)
{
    union { float whole[WIDTH]; uint16_t half[WIDTH]; } some = {{0}};
    if (half) __builtin_memcpy(some.half, (const uint16_t *)weights + at, 2 * count);
    else __builtin_memcpy(some.whole, (const float *)weights + at, 4 * count);
    return read_vec(&some, 0, half);
}

/* x [n, d] times m <= 4 rows of w, `apart` rows from each other. A vector that was read serves several sums, kept in
   registers; rows far apart are as many streams, which are fetched ahead, where neighbours would break one stream. */
INLINE void dots(const int n, const int m, const int fetch, const int half, const float *x, const void *w, long at,
                 long apart, long d, long w_stride, float *out, long out_stride)
{
    vec sum[ROWS][4];
    UNROLL for (int r = 0; r < n; r++) UNROLL for (int v = 0; v < m; v++) sum[r][v] = (vec){0};
    long k = 0;
    for (; k + WIDTH <= d; k += WIDTH) {
        vec row[4];
        UNROLL for (int v = 0; v < m; v++) {
            long place = (at + v * apart) * w_stride + k;
            row[v] = read_vec(w, place, half);
            KEEP(row[v]);
            if (fetch) __builtin_prefetch((const char *)w + (half ? 2 : 4) * place + 1024);
        }
        UNROLL for (int r = 0; r < n; r++) {
            vec one = *(const vec *)(x + r * d + k);
            KEEP(one);
            UNROLL for (int v = 0; v < m; v++) sum[r][v] = fused(row[v], one, sum[r][v]);
        }
    }
    if (k < d) UNROLL for (int v = 0; v < m; v++) {
        vec row = read_some(w, (at + v * apart) * w_stride + k, half, d - k);
        UNROLL for (int r = 0; r < n; r++) sum[r][v] = fused(row, read_some(x, r * d + k, 0, d - k), sum[r][v]);
    }
    if (n * m % WIDTH == 0) UNROLL for (int first = 0; first < n * m; first += WIDTH) {
        vec some[WIDTH];
        UNROLL for (int i = 0; i < WIDTH; i++) some[i] = sum[(first + i) / m][(first + i) % m];
        vec all = totals(some);
        UNROLL for (int i = 0; i < WIDTH; i++)
            out[(first + i) / m * out_stride + at + (first + i) % m * apart] = all[i];
    } else UNROLL for (int r = 0; r < n; r++) UNROLL for (int v = 0; v < m; v++)
        out[r * out_stride + at + v * apart] = total(sum[r][v]);
}

/* out[r, v] for v from begin to end. Two streams keep up with memory as long as all of x stays at hand in the nearest
   cache; four read x half as often. */
#define STREAMS(N, M, FETCH, HALF) { long apart = (end - begin) / M, v = begin; \
    for (; v < begin + apart; v++) dots(N, M, FETCH, HALF, x, w, v, apart, d, w_stride, out, stride); \
    for (v = begin + M * apart; v < end; v++) dots(N, 1, 0, HALF, x, w, v, 0, d, w_stride, out, stride); }
#define EACH(N) case N: \
    if (half) { STREAMS(N, 2, 1, 1) } else if (N > 5) { STREAMS(N, WIDE, 1, 0) } \
    else if (N * d > NEAR) { STREAMS(N, WIDE, 0, 0) } else { STREAMS(N, 2, 0, 0) } \
    break;

static void few_rows(int n, const float *x, const void *w, int half, long begin, long end, long d, long w_stride,
                     float *out, long stride)
{
    switch (n) { EACH(1) EACH(2) EACH(3) EACH(4) EACH(5) EACH(6) EACH(7) EACH(8) }
}

/* Four rows of x over the rows of w from `begin` to `end`: apart from `dots`, so that compilers find it simple. */
#define TILE(NAME, HALF) \
    static __attribute__((noinline)) void NAME(const float *x, const void *w, long begin, long end, long d, float *out, \
                                               long stride) \
    { \
        long apart = (end - begin) / WIDE; \
        for (long v = begin; v < begin + apart; v++) dots(4, WIDE, 0, HALF, x, w, v, apart, d, d, out, stride); \
        for (long v = begin + WIDE * apart; v < end; v++) dots(4, 1, 0, HALF, x, w, v, 0, d, d, out, stride); \
    }
TILE(tile_of_floats, 0)
TILE(tile_of_halves, 1)

/* More rows than ROWS, which keep the processor busy longer than memory: four by four, so that all sums stay in
   registers, and a block of the matrix at a time, which then stays in a cache for all rows. */
static void many_rows(int n, const float *x, const void *w, int half, long begin, long end, long d, float *out,
                      long stride)
{
    for (long block = begin; block < end; block += BLOCK) {
        long last = block + BLOCK < end ? block + BLOCK : end;
        for (int r = 0; r < n; r += 4) {
            const float *some = x + r * d;
            float *to = out + r * stride;
            if (n - r < 4) few_rows(n - r, some, w, half, block, last, d, d, to, stride);
            else (half ? tile_of_halves : tile_of_floats)(some, w, block, last, d, to, stride);
        }
    }
}

/* This thread's share of out [n, outputs] = x [n, inputs] times the matrix transposed, plus its bias. */
static void part_of_product(const struct matrix *m, int n, const float *x, float *out, int thread, int threads)
{
    long begin = m->outputs * thread / threads, end = m->outputs * (thread + 1) / threads, d = m->inputs;
    if (n <= ROWS) few_rows(n, x, m->weights, m->half, begin, end, d, d, out, m->outputs);
    else many_rows(n, x, m->weights, m->half, begin, end, d, out, m->outputs);
    if (m->bias)
        for (int r = 0; r < n; r++) for (long v = begin; v < end; v++) out[r * m->outputs + v] += m->bias[v];
}

void product(const struct matrix *m, int n, const float *x, float *out, int threads)
{
    #pragma omp parallel num_threads(threads)
    part_of_product(m, n, x, out, omp_get_thread_num(), omp_get_num_threads());
}

/* out [n, d] = x / sqrt(mean of x squared + eps) * weight, row by row. */
void rms_norm(int n, long d, const float *x, const float *weight, float eps, float *out)
{
    for (int r = 0; r < n; r++) {
        float square;
        dots(1, 1, 0, 0, x + r * d, x + r * d, 0, 0, d, d, &square, 1);
        float scale = 1.0f / __builtin_sqrtf(square / d + eps);
        for (long k = 0; k < d; k++) out[r * d + k] = x[r * d + k] * scale * weight[k];
    }
}

INLINE vec larger(vec a, vec b)
{
    ints first = a > b;
    return (vec)(((ints)a & first) | ((ints)b & ~first));
}

INLINE vec smaller(vec a, vec b)
{
    ints first = a < b;
    return (vec)(((ints)a & first) | ((ints)b & ~first));
}

/* e^x to about two units in the last place; 1e-38 below -87, and 1e38 above 88. x = n ln 2 + r, e^r by its series. */
INLINE vec exponential(vec x)
{
    x = smaller(larger(x, spread(-87.0f)), spread(88.0f));
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec r = fused(n, spread(2.12194440e-4f), x - n * 0.693359375f);
    vec p = fused(r, spread(1.0f / 5040), spread(1.0f / 720));
    p = fused(p, r, spread(1.0f / 120));
    p = fused(p, r, spread(1.0f / 24));
    p = fused(p, r, spread(1.0f / 6));
    p = fused(p, r, spread(0.5f));
    p = fused(p, r, spread(1.0f));
    p = fused(p, r, spread(1.0f));
    return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

static void turn(float *x, const float *cos, const float *sin, long width)
{
    long half = width / 2;
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* Products of one query with WIDTH keys, each summed in the same way. */
INLINE vec products(const float *query, const float *keys, long stride, long size)
{
    vec sum[WIDTH];
    long e = 0;
    UNROLL for (int t = 0; t < WIDTH; t++) sum[t] = (vec){0};
    for (; e + WIDTH <= size; e += WIDTH) {
        vec one = *(const vec *)(query + e);
        UNROLL for (int t = 0; t < WIDTH; t++) sum[t] = fused(one, *(const vec *)(keys + t * stride + e), sum[t]);
    }
    if (e < size) {
        vec one = read_some(query, e, 0, size - e);
        UNROLL for (int t = 0; t < WIDTH; t++)
            sum[t] = fused(one, read_some(keys, t * stride + e, 0, size - e), sum[t]);
    }
    return totals(sum);
}

/* Keys and values of places that come next, fetched a few at a time while others are worked on. */
struct ahead { const float *keys, *values; long left, some; };

INLINE void fetch(struct ahead *next, long stride, long size)
{
    for (long p = 0; p < next->some && next->left; p++, next->left--, next->keys += stride, next->values += stride)
        for (long e = 0; e < size; e += 16) {
            __builtin_prefetch(next->keys + e, 0, 2);
            __builtin_prefetch(next->values + e, 0, 2);
        }
}

/* score [places] of one query with keys, before which there are `before` more. Where a vector of places would reach
   beyond the last, it begins before the first, and writes there, too. */
static void score_keys(const float *query, const float *keys, long before, long places, long stride, long size,
                       float *score, struct ahead *next)
{
    if (before + places < WIDTH) {
        for (long p = 0; p < places; p++) score[p] = products(query, keys + p * stride, 0, size)[0];
        return;
    }
    for (long p = 0; p < places; p += WIDTH) {
        long at = p + WIDTH <= places ? p : places - WIDTH;
        fetch(next, stride, size);
        *(vec *)(score + at) = products(query, keys + at * stride, stride, size);
    }
}

/* Scores [CHUNK] of one query, products with keys on entry, to exponentials of their distance from the greatest, which
   comes first in `found` and is followed by their sum. Nothing is seen where -inf. */
static void weigh(float *score, long places, float scale, float *found)
{
    for (long t = places; t < CHUNK; t++) score[t] = -__builtin_inff();
    vec top = spread(-__builtin_inff());
    for (long t = 0; t < CHUNK; t += WIDTH) {
        vec one = *(vec *)(score + t) * scale;
        *(vec *)(score + t) = one;
        top = larger(one, top);
    }
    float most = top[0];
    for (int i = 1; i < WIDTH; i++) most = top[i] > most ? top[i] : most;
    vec sums = {0};
    for (long t = 0; t < CHUNK; t += WIDTH) {
        vec one = *(vec *)(score + t);
        ints seen = one > -__builtin_inff();
        one = (vec)((ints)exponential(one - most) & seen);
        *(vec *)(score + t) = one;
        sums += one;
    }
    found[0] = most;
    found[1] = total(sums);
}

/* What n queries get of the values: found [n, `apart` from each other]. A value that was read serves all of them. */
INLINE void mix(const int n, const float *scores, const float *values, long places, long stride, long size, float *found,
                long apart)
{
    long e = 0;
    for (; e + 4 * WIDTH <= size; e += 4 * WIDTH) {
        vec mixed[MIXED][4];
        UNROLL for (int r = 0; r < n; r++) UNROLL for (int i = 0; i < 4; i++) mixed[r][i] = (vec){0};
        for (long t = 0; t < places; t++) {
            vec value[4];
            UNROLL for (int i = 0; i < 4; i++) {
                value[i] = *(const vec *)(values + t * stride + e + i * WIDTH);
                KEEP(value[i]);
            }
            UNROLL for (int r = 0; r < n; r++) UNROLL for (int i = 0; i < 4; i++)
                mixed[r][i] = fused(spread(scores[r * ROW + t]), value[i], mixed[r][i]);
        }
        UNROLL for (int r = 0; r < n; r++) UNROLL for (int i = 0; i < 4; i++)
            *(vec *)(found + r * apart + e + i * WIDTH) = mixed[r][i];
    }
    for (; e < size; e += WIDTH) {
        long count = size - e < WIDTH ? size - e : WIDTH;
        UNROLL for (int r = 0; r < n; r++) {
            vec mixed = {0};
            for (long t = 0; t < places; t++)
                mixed = fused(spread(scores[r * ROW + t]), count == WIDTH ? *(const vec *)(values + t * stride + e)
                                                                       : read_some(values, t * stride + e, 0, count),
                              mixed);
            __builtin_memcpy(found + r * apart + e, &mixed, 4 * count);
        }
    }
}

/* Rows of one text, `first` the first of them, behind `past` places whose keys and values begin at `offset` of the
   buffers. visible [n, masked]: which of the last places, the rows' own included, a row sees; all see what is before
   these. NULL: each sees what is not behind it. keys, values: buffers of its own in place of the only layer's, or NULL. */
struct text { int first, n; long past, offset; float *keys, *values; };
struct seen { const unsigned char *visible; long masked; };

static float *keys_of(const struct layer *l, const struct text *t) { return t->keys ? t->keys : l->keys; }

static float *values_of(const struct layer *l, const struct text *t) { return t->values ? t->values : l->values; }

static long chunks_of(const struct text *t)
{
    return (t->past + t->n + CHUNK - 1) / CHUNK;
}

static int hidden_from(const struct text *t, const struct seen *seen, long row, long place)
{
    if (!seen->visible) return place > t->past + row;
    long behind = place - (t->past + t->n - seen->masked);
    return behind >= 0 && !seen->visible[row * seen->masked + behind];
}

/* All queries of one key-value head over one chunk of places. queries [J, n, G, E]; partial [J, n, G, most, 2 + E] */
static void attend_chunk(const struct layer *l, const struct shape *s, const struct text *t, const struct seen *seen,
                         long task, long after, long most, const float *queries, float *partial)
{
    long group = s->heads / s->kv_heads, count = t->n * group, chunks = chunks_of(t), j = task / chunks;
    long chunk = task % chunks, start = chunk * CHUNK, length = t->past + t->n;
    long places = length - start < CHUNK ? length - start : CHUNK, stride = s->place_stride, apart = most * (2 + s->head);
    long from = t->offset + j * s->head_stride + start * stride, masked = seen->visible ? seen->masked : t->n;
    float room[MIXED * ROW], *scores = room + WIDTH, scale = 1.0f / __builtin_sqrtf(s->head);
    long then = t->offset + after / chunks * s->head_stride + after % chunks * CHUNK * stride;
    const float *keys = keys_of(l, t), *values = values_of(l, t);
    struct ahead next = {keys + then, values + then, after < s->kv_heads * chunks ? CHUNK : 0, WIDTH / count + 1};
    int seen_by_all = start + places <= length - masked;
    for (long first = 0, some; first < count; first += some) {
        some = !seen_by_all ? 1 : count - first < MIXED ? count - first : MIXED;
        float *found = partial + (j * count + first) * apart + chunk * (2 + s->head);
        long visible = places;
        for (int i = 0; i < some; i++) {
            float *score = scores + i * ROW;
            score_keys(queries + (j * count + first + i) * s->head, keys + from, start, places, stride, s->head,
                       score, &next);
            for (long p = length - masked > start ? length - masked - start : 0; p < places; p++)
                if (hidden_from(t, seen, (first + i) / group, start + p)) score[p] = -__builtin_inff();
            while (visible && score[visible - 1] == -__builtin_inff()) visible--; /* 0 times no number is none */
            weigh(score, places, scale, found + i * apart);
        }
        if (some == 3) mix(3, scores, values + from, places, stride, s->head, found + 2, apart);
        else if (some == 2) mix(2, scores, values + from, places, stride, s->head, found + 2, apart);
        else mix(1, scores, values + from, visible, stride, s->head, found + 2, apart);
    }
}

/* The chunks of one query put together: out [E]. */
static void combine(const float *partial, long chunks, long size, float *out)
{
    float most = -__builtin_inff(), sum = 0;
    for (long c = 0; c < chunks; c++) most = partial[c * (2 + size)] > most ? partial[c * (2 + size)] : most;
    for (long e = 0; e < size; e++) out[e] = 0;
    for (long c = 0; c < chunks; c++) {
        const float *one = partial + c * (2 + size);
        if (!(one[1] > 0)) continue;
        float weight = exponential(spread(one[0] - most))[0];
        sum += weight * one[1];
        for (long e = 0; e < size; e++) out[e] += weight * one[2 + e];
    }
    for (long e = 0; e < size; e++) out[e] /= sum;
}

/* This thread's share of putting a text's projected heads in place: queries turned to [J, n, G, E], keys and values
   cached. q, k, v, cos and sin begin at the text's first row. */
static void place_heads(const struct layer *l, const struct shape *s, const struct text *t, const float *cos,
                        const float *sin, float *q, float *k, const float *v, float *queries, int thread, int threads)
{
    long group = s->heads / s->kv_heads;
    for (long i = thread; i < t->n * (s->heads + s->kv_heads); i += threads) {
        long r = i / (s->heads + s->kv_heads), h = i % (s->heads + s->kv_heads), key = h - s->heads;
        float *one = key < 0 ? q + (r * s->heads + h) * s->head : k + (r * s->kv_heads + key) * s->head;
        const float *norm = key < 0 ? l->q_norm : l->k_norm;
        if (norm) rms_norm(1, s->head, one, norm, s->eps, one);
        turn(one, cos + r * s->rotated, sin + r * s->rotated, s->rotated);
        long at = t->offset + key * s->head_stride + (t->past + r) * s->place_stride;
        float *to = key < 0 ? queries + ((h / group * t->n + r) * group + h % group) * s->head : keys_of(l, t) + at;
        __builtin_memcpy(to, one, 4 * s->head);
        if (key >= 0) __builtin_memcpy(values_of(l, t) + at, v + (r * s->kv_heads + key) * s->head, 4 * s->head);
    }
}

/* inner [n, I] = silu(inner) * up, for this thread's columns, as part_of_product divides them. */
static void gate(float *inner, const float *up, int n, long width, int thread, int threads)
{
    long begin = width * thread / threads, end = width * (thread + 1) / threads;
    for (int r = 0; r < n; r++) for (long i = begin; i < end; i++) {
        float *one = inner + r * width + i;
        if (i + WIDTH <= end) {
            vec x = *(vec *)one;
            *(vec *)one = x / (1.0f + exponential(-x)) * *(const vec *)(up + r * width + i);
            i += WIDTH - 1;
        } else *one = *one / (1.0f + exponential((vec){0} - *one)[0]) * up[r * width + i];
    }
}

static void add_columns(float *out, const float *x, int n, long width, int thread, int threads)
{
    for (int r = 0; r < n; r++)
        for (long i = width * thread / threads; i < width * (thread + 1) / threads; i++)
            out[r * width + i] += x[r * width + i];
}

static long most_chunks(const struct text *texts, int count)
{
    long most = 0;
    for (int t = 0; t < count; t++) most = chunks_of(texts + t) > most ? chunks_of(texts + t) : most;
    return most;
}

/* Floats of scratch that `blocks` needs for n rows in all. */
long scratch(const struct shape *s, int n, const struct text *texts, int count, int threads)
{
    return n * ((threads + 1) * s->hidden + (3 * s->heads + 2 * s->kv_heads) * s->head + 2 * s->inner)
        + n * s->heads * most_chunks(texts, count) * (2 + s->head);
}

/* Attention of all texts: queries, keys and values as projected, to mixed [n, H E]. */
static void attend(const struct layer *l, const struct shape *s, const struct text *texts, int count,
                   const struct seen *seen, long most, const float *cos, const float *sin, float *q, float *k,
                   const float *v, float *queries, float *partial, float *mixed, int me, int all)
{
    long wide = s->heads * s->head, narrow = s->kv_heads * s->head, group = s->heads / s->kv_heads, task = 0;
    for (const struct text *t = texts; t < texts + count; t++)
        place_heads(l, s, t, cos + t->first * s->rotated, sin + t->first * s->rotated, q + t->first * wide,
                    k + t->first * narrow, v + t->first * narrow, queries + t->first * wide, me, all);
    #pragma omp barrier
    for (const struct text *t = texts; t < texts + count; t++)
        for (long i = 0; i < s->kv_heads * chunks_of(t); i++)
            if (task++ % all == me)
                attend_chunk(l, s, t, seen, i, i + all, most, queries + t->first * wide,
                             partial + t->first * s->heads * most * (2 + s->head));
    #pragma omp barrier
    for (const struct text *t = texts; t < texts + count; t++)
        for (long one = 0; one < t->n * s->heads; one++) {
            if (task++ % all != me) continue;
            long r = one / s->heads, h = one % s->heads, query = (h / group * t->n + r) * group + h % group;
            combine(partial + (t->first * s->heads + query) * most * (2 + s->head), chunks_of(t), s->head,
                    mixed + (t->first * s->heads + one) * s->head);
        }
}

/* states [layers + 1, n, D]: the first is given, each block reads one and writes the next. inputs [n, width of q]: what
   the only block's attention reads instead of its normalised state; else NULL. cos, sin [n, rotated]: as in
   `blocks.Turn`. visible [n, masked]: as in `text`, of a single one. */
void blocks(const struct shape *s, const struct layer *layers, int count, int n, const struct text *texts,
            int text_count, const float *inputs, const float *cos, const float *sin, const unsigned char *visible,
            long masked, float *states, float *scratch, int threads)
{
    const struct seen seen = {visible, masked};
    long most = most_chunks(texts, text_count), wide = s->heads * s->head, narrow = s->kv_heads * s->head;
    long size = n * s->hidden;
    float *middle = scratch, *q = middle + size, *k = q + n * wide, *v = k + n * narrow, *queries = v + n * narrow;
    float *mixed = queries + n * wide, *inner = mixed + n * wide, *up = inner + n * s->inner;
    float *partial = up + n * s->inner, *norms = partial + n * s->heads * most * (2 + s->head);
    #pragma omp parallel num_threads(threads)
    {
        int me = omp_get_thread_num(), all = omp_get_num_threads();
        float *norm = norms + me * size;
        for (int i = 0; i < count; i++) {
            const struct layer *l = layers + i;
            float *state = states + i * size, *next = state + size;
            if (!inputs) rms_norm(n, s->hidden, state, l->attention_norm, s->eps, norm);
            part_of_product(&l->q, n, inputs ? inputs : norm, q, me, all);
            part_of_product(&l->k, n, inputs ? inputs : norm, k, me, all);
            part_of_product(&l->v, n, inputs ? inputs : norm, v, me, all);
            #pragma omp barrier
            attend(l, s, texts, text_count, &seen, most, cos, sin, q, k, v, queries, partial, mixed, me, all);
            #pragma omp barrier
            part_of_product(&l->o, n, mixed, middle, me, all);
            add_columns(middle, state, n, s->hidden, me, all);
            #pragma omp barrier
            rms_norm(n, s->hidden, middle, l->mlp_norm, s->eps, norm);
            part_of_product(&l->gate, n, norm, inner, me, all);
            part_of_product(&l->up, n, norm, up, me, all);
            gate(inner, up, n, s->inner, me, all);
            #pragma omp barrier
            part_of_product(&l->down, n, inner, next, me, all);
            add_columns(next, middle, n, s->hidden, me, all);
            #pragma omp barrier
        }
    }
}
