/* Small allocations, as CUDA makes them: out of blocks, which lie at multiples of their size and live until the last allocation
 * in them is freed. Called with the lock of memory.c held. */
#include "gpu.h"

#include <stdlib.h>

enum { BLOCKS = 8192, PIECE = 4096, PIECES = 512 };
#define FIRST_BLOCK 0x7000000000ull

static struct {
    unsigned char used[PIECES]; /* 1: the first piece of an allocation; 2: a further one */
    unsigned live;
    int device;
} blocks[BLOCKS];

int sd_is_small(uint64_t bytes) { return state->block_bytes == PIECE * PIECES && bytes <= state->block_bytes / 2; }
int sd_in_block(uint64_t key) { return key >= FIRST_BLOCK && key < FIRST_BLOCK + (uint64_t)BLOCKS * PIECE * PIECES; }

static int room_at(unsigned block, unsigned pieces, unsigned *at)
{
    unsigned run = 0;
    for (unsigned i = 0; i < PIECES; i++) {
        run = blocks[block].used[i] ? 0 : run + 1;
        if (run == pieces)
            return *at = i + 1 - pieces, 1;
    }
    return 0;
}

int sd_block_allocate(uint64_t bytes, int device, uint64_t *key)
{
    unsigned pieces = (unsigned)((bytes + PIECE - 1) / PIECE), at = 0, block = BLOCKS, empty = BLOCKS;
    for (unsigned i = 0; i < BLOCKS && block == BLOCKS; i++) {
        if (blocks[i].live == 0 && empty == BLOCKS)
            empty = i;
        if (blocks[i].live != 0 && blocks[i].device == device && room_at(i, pieces, &at))
            block = i;
    }
    if (block == BLOCKS) {
        int code = empty == BLOCKS ? OUT_OF_MEMORY : sd_take((uint64_t)PIECE * PIECES, device);
        if (code != OK)
            return code;
        block = empty;
        blocks[block].device = device;
        at = 0;
    }
    blocks[block].live++;
    for (unsigned i = 0; i < pieces; i++)
        blocks[block].used[at + i] = i == 0 ? 1 : 2;
    return *key = FIRST_BLOCK + ((uint64_t)block * PIECES + at) * PIECE, OK;
}

int sd_block_free(uint64_t key)
{
    uint64_t piece = (key - FIRST_BLOCK) / PIECE;
    unsigned block = (unsigned)(piece / PIECES), at = (unsigned)(piece % PIECES);
    if (blocks[block].used[at] != 1)
        return INVALID;
    do
        blocks[block].used[at++] = 0;
    while (at < PIECES && blocks[block].used[at] == 2);
    if (--blocks[block].live == 0)
        sd_give((uint64_t)PIECE * PIECES, blocks[block].device);
    return OK;
}

void sd_blocks_free_all(void)
{
    for (unsigned i = 0; i < BLOCKS; i++)
        for (unsigned at = 0; at < PIECES; at++)
            if (blocks[i].used[at] == 1)
                sd_block_free(FIRST_BLOCK + ((uint64_t)i * PIECES + at) * PIECE);
}
