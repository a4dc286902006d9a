#pragma once
/* What gpu_rows.cu computes, by OPERATION; the words are explained there. */
#define LOG_SUM 1
#define MOMENTS 2
#define SUMS 3
#define BEST 4
#define COPY 5

#if OPERATION == 0 /* softmax */
#define KIND LOG_SUM
#define SETUP const float scale = 1 / state.s;
#define EACH o = exponential(x - state.m) * scale;
#elif OPERATION == 1 /* log_softmax */
#define KIND LOG_SUM
#define SETUP const float log_s = logf(state.s);
#define EACH o = x - state.m - log_s;
#elif OPERATION == 2 /* logsumexp */
#define KIND LOG_SUM
#define INFINITE 1
#define ROW state.m + logf(state.s)
#elif OPERATION == 3 /* layer_norm */
#define KIND MOMENTS
#define VECTORS 2
#define SETUP const float scale = rsqrtf(state.squares / columns + 1e-5f);
#define EACH o = (x - state.mean) * scale * g + h;
#elif OPERATION == 4 /* rms_norm */
#define KIND SUMS
#define VECTORS 1
#define S x * x
#define SETUP const float scale = rsqrtf(state.s / columns + 1e-6f);
#define EACH o = x * scale * g;
#elif OPERATION == 5 /* residual_rms_norm */
#define KIND SUMS
#define MATRICES 2
#define VECTORS 1
#define OUTPUTS 2
#define S (x + y) * (x + y)
#define SETUP const float scale = rsqrtf(state.s / columns + 1e-6f);
#define EACH o = x + y, p = (x + y) * scale * g;
#elif OPERATION == 6 /* normalise_rows */
#define KIND SUMS
#define S x * x
#define SETUP const float scale = 1 / larger(sqrtf(state.s), 1e-12f);
#define EACH o = x * scale;
#elif OPERATION == 7 /* sum_rows */
#define KIND SUMS
#define S x
#define ROW state.s
#elif OPERATION == 8 /* variance_rows */
#define KIND MOMENTS
#define ROW state.squares / (columns - 1)
#elif OPERATION == 9 /* l2_norm_rows */
#define KIND SUMS
#define S x * x
#define ROW sqrtf(state.s)
#elif OPERATION == 10 /* max_rows */
#define KIND BEST
#define ROW state.value
#define INDEX 2
#elif OPERATION == 11 /* count_positive: sums of ones are exact in fp32 up to 2^24 */
#define KIND SUMS
#define S (x > 0 ? 1.0f : 0.0f)
#define ROW state.s
#define ROW_TYPE long long
#elif OPERATION == 12 /* temperature_softmax */
#define KIND LOG_SUM
#define FACTOR 1
#define BEFORE x = x / r;
#define SETUP const float scale = 1 / state.s;
#define EACH o = exponential(x - state.m) * scale;
#elif OPERATION == 13 /* greedy_token */
#define KIND BEST
#define INDEX 1
#elif OPERATION == 14 /* gumbel_sampling */
#define KIND BEST
#define MATRICES 2
#define BEFORE x = x - logf(-logf(clipped(y, 1e-6f, (float)(1 - 1e-6))));
#define INDEX 1
#elif OPERATION == 15 /* min_p_filter */
#define KIND BEST
#define SETUP const float limit = state.value - 2.99573227f;
#define EACH o = x < limit ? -INFINITY_ : x;
#elif OPERATION == 16 /* cross_entropy */
#define KIND LOG_SUM
#define LABEL 1
#define CHOSEN 1
#define ROW state.m - chosen + logf(state.s)
#define TOTAL total / rows
#elif OPERATION == 17 /* cross_entropy_smoothed */
#define KIND LOG_SUM
#define LABEL 1
#define CHOSEN 1
#define PLAIN_SUM 1
#define ROW logf(state.s) - 0.9f * (chosen - state.m) - 0.1f * (state.t / columns - state.m)
#elif OPERATION == 18 /* cross_entropy_gradient */
#define KIND LOG_SUM
#define LABEL 1
#define SETUP const float scale = 1 / (state.s * rows), one = 1.0f / rows;
#define EACH o = exponential(x - state.m) * scale - (column + k == label ? one : 0);
#elif OPERATION == 19 /* kl_divergence of logarithms */
#define KIND SUMS
#define MATRICES 2
#define S exponential(y) * (y - x)
#define ROW state.s
#define TOTAL total / rows
#elif OPERATION == 20 /* cosine_distance: the similarity rounds to the task's type before it is taken from one */
#define KIND SUMS
#define MATRICES 2
#define S x * y
#define T x * x
#define U y * y
#define ROW 1 - widened(narrowed(state.s / (larger(sqrtf(state.t), 1e-8f) * larger(sqrtf(state.u), 1e-8f))))
#elif OPERATION == 21 /* gaussian_likelihood: z variance */
#define KIND SUMS
#define MATRICES 3
#define S logf(z) + (x - y) * (x - y) / z
#define ROW 0.5f * (state.s / columns + 1.83787707f)
#elif OPERATION == 22 /* triplet_margin: x anchor, y positive, z negative */
#define KIND SUMS
#define MATRICES 3
#define S (x - y + 1e-6f) * (x - y + 1e-6f)
#define T (x - z + 1e-6f) * (x - z + 1e-6f)
#define ROW larger(sqrtf(state.s) - sqrtf(state.t) + 1, 0)
#define TOTAL total / rows
#elif OPERATION == 23 /* dice */
#define KIND SUMS
#define MATRICES 2
#define SECOND unsigned char
#define BEFORE x = quotient(1, 1 + exponential(-x));
#define S x * y
#define T x + y
#define ROW 1 - (2 * state.s + 1) / (state.t + 1)
#elif OPERATION == 24 /* clip_gradient_adaptive: x parameter, y gradient */
#define KIND SUMS
#define MATRICES 2
#define S x * x
#define T y * y
#define SETUP const float scale = smaller(0.01f * larger(sqrtf(state.s), 1e-3f) / larger(sqrtf(state.t), 1e-6f), 1);
#define EACH o = y * scale;
#elif OPERATION == 25 /* quantise_int8 */
#define KIND SUMS
#define OUT signed char
#define LARGEST 1
#define S fabsf(x)
#define SETUP const float scale = larger(state.s, 1e-6f) / 127;
#define EACH o = clipped(rintf(x / scale), -127, 127);
#define ROW scale
#elif OPERATION == 26 /* instance_norm: a row is one channel of one image */
#define KIND MOMENTS
#define SETUP const float scale = rsqrtf(state.squares / columns + 1e-5f);
#define EACH o = (x - state.mean) * scale;
#elif OPERATION == 27 /* global_average_pool */
#define KIND SUMS
#define S x
#define ROW state.s / columns
#elif OPERATION == 28 /* matvec */
#define KIND SUMS
#define VECTORS 1
#define VECTORS_FIRST 1
#define S x * g
#define ROW state.s
#elif OPERATION == 29 /* embedding_position_norm: rows of a table by number, y positions that repeat */
#define KIND MOMENTS
#define MATRICES 2
#define LABEL 1
#define GATHER 1
#define VECTORS 2
#define BEFORE x = x + y;
#define SETUP const float scale = rsqrtf(state.squares / columns + 1e-5f);
#define EACH o = (x - state.mean) * scale * g + h;
#elif OPERATION == 30 /* embedding_similarity: y the query of the row's bag */
#define KIND SUMS
#define MATRICES 2
#define LABEL 1
#define GATHER 2
#define S x * y
#define ROW state.s
#elif OPERATION == 31 /* embedding: rows of a table by number */
#define KIND COPY
#define LABEL 1
#define GATHER 1
#define EACH o = x;
#elif OPERATION == 32 /* group_norm: a row is a group of one image, gain and shift are of its planes */
#define KIND MOMENTS
#define VECTORS 2
#define OF_PLANES 1
#define SETUP const float scale = rsqrtf(state.squares / columns + 1e-5f);
#define EACH o = (x - state.mean) * scale * g + h;
#endif

#ifndef MATRICES
#define MATRICES 1
#endif
#ifndef VECTORS
#define VECTORS 0
#endif
#ifndef VECTORS_FIRST
#define VECTORS_FIRST 0
#endif
#ifndef OUTPUTS
#define OUTPUTS 1
#endif
#ifndef SECOND
#define SECOND real
#endif
#ifndef OUT
#define OUT real
#endif
#ifndef OF_PLANES
#define OF_PLANES 0
#endif
#ifndef LABEL
#define LABEL 0
#endif
#ifndef FACTOR
#define FACTOR 0
#endif
#ifndef CHOSEN
#define CHOSEN 0
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef BEFORE
#define BEFORE
#endif
#ifndef SETUP
#define SETUP
#endif
#ifndef INFINITE
#define INFINITE 0
#endif
#ifndef PLAIN_SUM
#define PLAIN_SUM 0
#endif
#ifndef LARGEST
#define LARGEST 0
#endif
#ifndef INDEX
#define INDEX 0
#endif
#if defined(TOTAL)
#define ROW_TYPE float
#elif !defined(ROW_TYPE)
#define ROW_TYPE real
#endif
