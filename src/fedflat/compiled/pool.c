/* Max-pooling of 2×2 pixels for maps in the memory format channels_last: pixels of c numbers, rows of w pixels, maps of
   h rows. REAL is float or double; with BFLOAT16 the numbers are those, the upper halves of floats.

   `places` says which pixel of a window was the largest: 0 and 1 in its first row, 2 and 3 in its second one. Rows and
   columns that do not fill a window are left out. */

#include <stdint.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t element;

static inline REAL value(element x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

static inline element shortened(REAL x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 16;
}
#else
typedef REAL element;

static inline REAL value(element x) { return x; }
static inline element shortened(REAL x) { return x; }
#endif

#define WINDOWS(i, j) for (long s = 0; s < n; s++) for (long i = 0; i + 1 < h; i += 2) for (long j = 0; j + 1 < w; j += 2)
#define PIXEL(maps, i, j) ((maps) + ((s * h + (i)) * w + (j)) * c)

/* y = max x over each window; a NaN counts as the largest, as in torch. */
void largest(long n, long h, long w, long c, const element *x, element *y, uint8_t *places)
{
    WINDOWS(i, j) {
        const element *pixels[] = {PIXEL(x, i, j), PIXEL(x, i, j + 1), PIXEL(x, i + 1, j), PIXEL(x, i + 1, j + 1)};
        for (long k = 0; k < c; k++) {
            REAL best = value(pixels[0][k]);
            uint8_t place = 0;
#define COMPARE(number)                                \
    {                                                  \
        REAL other = value(pixels[number][k]);         \
        int larger = other > best || other != other;   \
        best = larger ? other : best;                  \
        place = larger ? number : place;               \
    }
            COMPARE(1) COMPARE(2) COMPARE(3)
            y[k] = shortened(best);
            places[k] = place;
        }
        y += c;
        places += c;
    }
}

/* The adjoint: each number of y goes to its place in x, and zeros to the others of its window. */
void scatter(long n, long h, long w, long c, element *x, const element *y, const uint8_t *places)
{
    WINDOWS(i, j) {
        for (int place = 0; place < 4; place++) {
            element *pixel = PIXEL(x, i + place / 2, j + place % 2);
            for (long k = 0; k < c; k++) pixel[k] = places[k] == place ? y[k] : 0;
        }
        y += c;
        places += c;
    }
}

/* Reads at these places, y = x[place]: the adjoint of `scatter`. */
void gather(long n, long h, long w, long c, const element *x, element *y, const uint8_t *places)
{
    WINDOWS(i, j) {
        for (long k = 0; k < c; k++) y[k] = PIXEL(x, i + places[k] / 2, j + places[k] % 2)[k];
        y += c;
        places += c;
    }
}
