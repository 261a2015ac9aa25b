/* Charges for plain memory and arrays. CUDA takes small allocations out of blocks of 2 MiB, and keeps a block until the last
 * allocation in it is freed: a block is charged as a whole, however much of it is in use. */
#include "aim.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static uint64_t page_of(const struct aim_driver *driver, int device)
{
    const struct aim_share *share = aim_share_of(device);
    uint64_t page = share == NULL || share->tenant == NULL ? 0 : load(&share->tenant->rounding_bytes);
    return page != 0 ? page : driver->rounding;
}

/* Drivers hand out large memory in whole pages; what is charged must not be less than what is taken. */
uint64_t aim_round(const struct aim_driver *driver, int device, uint64_t bytes)
{
    uint64_t page = page_of(driver, device);
    if (page < 2 || bytes == 0)
        return bytes;
    uint64_t unit = bytes > page / 2 ? page : 512;
    uint64_t rest = bytes % unit;
    if (rest == 0)
        return bytes;
    return bytes > UINT64_MAX - unit ? UINT64_MAX : bytes - rest + unit;
}

static int shares_a_block(const struct aim_driver *driver, enum aim_kind kind, int device, uint64_t bytes)
{
    uint64_t block = driver->block_bytes;
    return kind == K_LINEAR && block != 0 && bytes != 0 && bytes <= block / 2 && page_of(driver, device) == block;
}

/* What is charged before the call: it may need a new block. */
uint64_t aim_charge_of(const struct aim_driver *driver, enum aim_kind kind, int device, uint64_t bytes)
{
    return shares_a_block(driver, kind, device, bytes) ? driver->block_bytes : aim_round(driver, device, bytes);
}

/* `charged` is kept for an allocation that is not in a block, or is the first in its block. */
void aim_track(const struct aim_driver *driver, enum aim_kind kind, uint64_t key, int device, uint64_t bytes, uint64_t charged)
{
    struct aim_entry entry = {.kind = kind, .key = key, .device = device, .bytes = charged}, block;
    entry.context = INSIDE(driver->context());
    if (!shares_a_block(driver, kind, device, bytes)) {
        aim_allocation_put(&entry);
        return;
    }
    entry.bytes = 0;
    entry.of = key / driver->block_bytes + 1;
    pthread_mutex_lock(&mutex);
    int known = aim_allocation_get(K_BLOCK, entry.of, &block);
    if (!known)
        block = (struct aim_entry){.kind = K_BLOCK, .key = entry.of, .device = device, .bytes = charged, .context = entry.context};
    block.block.allocations++;
    aim_allocation_put(&block);
    aim_allocation_put(&entry);
    pthread_mutex_unlock(&mutex);
    if (known)
        aim_give_back(device, charged);
}

/* After the driver freed it; `held` was taken out before. */
void aim_untrack(const struct aim_entry *held)
{
    struct aim_entry block;
    uint64_t bytes = held->bytes;
    if (held->kind == K_LINEAR && held->of != 0) {
        pthread_mutex_lock(&mutex);
        if (aim_allocation_take(K_BLOCK, held->of, &block)) {
            if (--block.block.allocations > 0)
                aim_allocation_put(&block);
            else
                bytes = block.bytes;
        }
        pthread_mutex_unlock(&mutex);
    }
    aim_give_back(held->device, bytes);
}

void aim_blocks_after_fork(void) { pthread_mutex_init(&mutex, NULL); }
