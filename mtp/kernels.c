/* Products of a few rows with large matrices, as fast as the matrices can be read.

   Every sum is taken in one order that does not depend on how many rows there are, so a row gets the same numbers
   alone and among others. Shapes: n rows of x [n, d]; matrix w [v, d]; out [n, v]. All float32 and dense. */

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define MOST_ROWS 8
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4)));

typedef float vec8 __attribute__((vector_size(32), aligned(4)));
typedef float vec4 __attribute__((vector_size(16), aligned(4)));

static inline __attribute__((always_inline)) float total(vec sum)
{
    union { vec whole; vec8 eight[2]; vec4 four[4]; float one[16]; } parts;
    parts.whole = sum;
    if (WIDTH > 8) parts.eight[0] += parts.eight[1];
    if (WIDTH > 4) parts.four[0] += parts.four[1];
    return (parts.one[0] + parts.one[2]) + (parts.one[1] + parts.one[3]);
}

/* x [n, d] times m rows of w, at most four of them. A vector that was read serves several sums, kept in registers. */
static inline __attribute__((always_inline)) void dots(
    const int n, const int m, const int fetch, const float *x, const float *w, long d, float *out, long stride)
{
    vec sum[MOST_ROWS][4];
    UNROLL for (int r = 0; r < n; r++) UNROLL for (int v = 0; v < m; v++) sum[r][v] = (vec){0};
    long k = 0;
    for (; k + WIDTH <= d; k += WIDTH) {
        vec row[4];
        UNROLL for (int v = 0; v < m; v++) {
            row[v] = *(const vec *)(w + v * d + k);
            if (fetch) __builtin_prefetch(w + (v + 2 * m) * d + k);
        }
        UNROLL for (int r = 0; r < n; r++) {
            vec one = *(const vec *)(x + r * d + k);
            UNROLL for (int v = 0; v < m; v++) sum[r][v] += row[v] * one;
        }
    }
    UNROLL for (int r = 0; r < n; r++) UNROLL for (int v = 0; v < m; v++) {
        float sum_rv = total(sum[r][v]);
        for (long j = k; j < d; j++) sum_rv += w[v * d + j] * x[r * d + j];
        out[r * stride + v] = sum_rv;
    }
}

/* Up to four rows, one row of w at a time is fastest, since it is read as one stream; beyond, four share what is read. */
#define FEW(N) case N: for (long v = begin; v < end; v++) dots(N, 1, 0, x, w + v * d, d, out + v, stride); break;
#define MANY(N) case N: { long v = begin; \
    for (; v + 4 <= end; v += 4) dots(N, 4, 1, x, w + v * d, d, out + v, stride); \
    for (; v < end; v++) dots(N, 1, 0, x, w + v * d, d, out + v, stride); } break;

static void part_of_products(int n, const float *x, const float *w, long begin, long end, long d, float *out, long stride)
{
    switch (n) { FEW(1) FEW(2) FEW(3) FEW(4) MANY(5) MANY(6) MANY(7) MANY(8) }
}

/* out [n, v] = x [n, d] times w [v, d] transposed. */
void products(int n, long d, long v, const float *x, const float *w, float *out, int threads)
{
    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; t++) part_of_products(n, x, w, v * t / threads, v * (t + 1) / threads, d, out, v);
}

/* out [n, d] = x / sqrt(mean of x squared + eps) * weight, row by row. */
void rms_norm(int n, long d, const float *x, const float *weight, float eps, float *out)
{
    for (int r = 0; r < n; r++) {
        float square;
        dots(1, 1, 0, x + r * d, x + r * d, d, &square, 1);
        float scale = 1.0f / __builtin_sqrtf(square / d + eps);
        for (long k = 0; k < d; k++) out[r * d + k] = x[r * d + k] * scale * weight[k];
    }
}
