/* How many bytes an array takes at least. Drivers lay arrays out in blocks, so a row is counted in whole 64 bytes; a row of pitched
 * memory in whole 512 bytes. */
#include "wrappers.h"

static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

uint64_t aim_format_bytes(unsigned format)
{
    switch (format) {
    case 0x01: /* unsigned and signed 8 bit */
    case 0x08:
        return 1;
    case 0x02: /* 16 bit, half */
    case 0x09:
    case 0x10:
        return 2;
    case 0x03: /* 32 bit, float */
    case 0x0a:
    case 0x20:
        return 4;
    default: /* packed and planar formats: the widest of them */
        return 8;
    }
}

uint64_t aim_pitch_bytes(size_t width, size_t height)
{
    uint64_t row = width > UINT64_MAX - 511 ? UINT64_MAX : (width + 511) / 512 * 512;
    return times(row, height == 0 ? 1 : height);
}

uint64_t aim_array_bytes(size_t width, size_t height, size_t depth, uint64_t element)
{
    uint64_t row = times(width, element), rows = times(height == 0 ? 1 : height, depth == 0 ? 1 : depth);
    if (rows > 1)
        row = row > UINT64_MAX - 63 ? UINT64_MAX : (row + 63) / 64 * 64;
    return times(row, rows);
}

uint64_t aim_mipmap_bytes(size_t width, size_t height, size_t depth, uint64_t element, unsigned levels)
{
    uint64_t sum = 0;
    for (unsigned level = 0; level < (levels == 0 ? 1 : levels > 32 ? 32 : levels); level++) {
        uint64_t one = aim_array_bytes(width, height, depth, element);
        sum = sum + one < sum ? UINT64_MAX : sum + one;
        width = width > 1 ? width / 2 : width;
        height = height > 1 ? height / 2 : height;
        depth = depth > 1 ? depth / 2 : depth;
    }
    return sum;
}
