/* Charges for plain and pooled memory, and for limits of contexts. A pool is charged for what it holds, not only for what was
 * requested from it. A destroyed pool lives on, under an identity of our own, until its last allocation is freed. */
#include "gate.h"
#include "wrappers.h"

#include <string.h>

enum { RESERVED_NOW = 5 }; /* CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT and its HIP twin */

static pthread_mutex_t pools_mutex = PTHREAD_MUTEX_INITIALIZER;
static int pools_dirty;
static uint64_t dying_pools;
#define DYING (1ull << 63)

static void refresh(const struct aim_driver *driver, int device, int synchronised);

/* Trims pools before it gives up. What was freed from destroyed pools stays charged until the program synchronises: to
 * synchronise a whole context from within an allocation is not ours to do. */
int aim_reserve_or_trim(const struct aim_driver *driver, int device, uint64_t bytes)
{
    if (aim_try_reserve(device, bytes))
        return 1;
    struct aim_entry pool = {.key = 0};
    int any = aim_late_settle(driver, 0);
    pthread_mutex_lock(&pools_mutex); /* no thread can destroy a pool while it is trimmed */
    while (aim_allocation_next(K_POOL, device, pool.key, &pool))
        if (!(pool.key & DYING)) {
            INSIDE(RELAXED(driver, driver->pool_trim((void *)(uintptr_t)pool.key, 0)));
            any = 1;
        }
    pthread_mutex_unlock(&pools_mutex);
    uint64_t reserved = 0;
    if (INSIDE(driver->graph_reserved(device, &reserved)) == 0 && reserved > 0) {
        INSIDE(RELAXED(driver, driver->graph_trim(device)));
        aim_graph_settle(driver, device);
        any = 1;
    }
    if (any)
        refresh(driver, device, 0);
    if (any && aim_try_reserve(device, bytes))
        return 1;
    aim_count_refusal(device);
    return 0;
}

void aim_forget_device(const struct aim_driver *driver, int device)
{
    unsigned owned = 1u << K_LINEAR | 1u << K_BLOCK | 1u << K_ARRAY | 1u << K_MEMORY | 1u << K_POOL | 1u << K_LIMIT;
    aim_give_back(device, aim_allocations_take_all(device, owned));
    aim_late_context_ended(0);
    aim_allocations_take_all(device, 1u << K_POOLED | 1u << K_HANDLE);
    aim_mappings_forget(device);
    aim_graph_settle(driver, device);
}

static uint64_t whole_grains(const struct aim_driver *driver, uint64_t bytes)
{
    uint64_t part = bytes % driver->pool_grain;
    return part == 0 || bytes > UINT64_MAX - driver->pool_grain ? bytes : bytes + driver->pool_grain - part;
}

/* With the mutex held: charge the pool for what it holds now, and for what the calls under way may add. 0: no room. */
static int settle(const struct aim_driver *driver, struct aim_entry *pool)
{
    uint64_t held = 0, want;
    if (pool->key & DYING) {
        want = pool->pool.grains < pool->bytes ? pool->pool.grains : pool->bytes;
    } else {
        if (INSIDE(driver->pool_attribute((void *)(uintptr_t)pool->key, RESERVED_NOW, &held)) != 0)
            held = 0;
        if (pool->pool.live > held)
            held = whole_grains(driver, pool->pool.live);
        want = held + pool->pool.growing;
        if (want > pool->bytes) /* a call under way has taken part of its growth already */
            want = held > pool->bytes ? held : pool->bytes;
    }
    if (want > pool->bytes && !aim_try_reserve(pool->device, want - pool->bytes))
        return 0;
    if (want < pool->bytes)
        aim_give_back(pool->device, pool->bytes - want);
    pool->bytes = want;
    return 1;
}

static void refresh(const struct aim_driver *driver, int device, int synchronised)
{
    pthread_mutex_lock(&pools_mutex);
    struct aim_entry pool = {.key = 0};
    while (aim_allocation_next(K_POOL, device, pool.key, &pool)) {
        int dying = (pool.key & DYING) != 0;
        if (dying ? !synchronised : pool.device < 0)
            continue;
        if (dying && pool.pool.live == 0 && aim_allocation_take(K_POOL, pool.key, &pool))
            aim_give_back(pool.device, pool.bytes);
        else if (settle(driver, &pool))
            aim_allocation_put(&pool);
    }
    pthread_mutex_unlock(&pools_mutex);
}

/* `device` -1: after a synchronisation, for all pools of which something was freed. */
void aim_pools_refresh(const struct aim_driver *driver, int device)
{
    if (device < 0)
        aim_late_settle(driver, 1);
    if (device >= 0 || __atomic_exchange_n(&pools_dirty, 0, __ATOMIC_RELAXED))
        refresh(driver, device, device < 0);
}

int aim_pool_device(const struct aim_driver *driver, void *pool)
{
    struct aim_entry entry;
    if (aim_allocation_get(K_POOL, (uint64_t)(uintptr_t)pool, &entry))
        return entry.device;
    for (int device = 0; device < AIM_DEVICES; device++) {
        void *own = INSIDE(driver->device_pool(device));
        if (own == NULL)
            break;
        if (own == pool)
            return device;
    }
    return INSIDE(driver->device());
}

static void release_from(const struct aim_driver *driver, struct aim_entry *pool, uint64_t bytes)
{
    uint64_t grains = whole_grains(driver, bytes);
    pool->pool.live -= bytes < pool->pool.live ? bytes : pool->pool.live;
    pool->pool.grains -= grains < pool->pool.grains ? grains : pool->pool.grains;
}

static struct aim_entry pool_entry(void *pool, int device)
{
    struct aim_entry entry;
    if (!aim_allocation_get(K_POOL, (uint64_t)(uintptr_t)pool, &entry))
        entry = (struct aim_entry){.kind = K_POOL, .key = (uint64_t)(uintptr_t)pool, .device = device};
    return entry;
}

/* What a pool has free may lie in pieces, or wait for a stream: it may grow by the whole request, whatever it holds. That is
 * charged before the call; a pool that grew first and was charged afterwards would pass the cap for a moment. */
int aim_pool_begin(int device, const struct aim_driver *driver, void *pool, uint64_t bytes)
{
    uint64_t growth = whole_grains(driver, bytes);
    if (!aim_reserve_or_trim(driver, device, growth))
        return 0;
    pthread_mutex_lock(&pools_mutex);
    struct aim_entry entry = pool_entry(pool, device);
    entry.bytes += growth;
    entry.pool.growing += growth;
    aim_allocation_put(&entry);
    pthread_mutex_unlock(&pools_mutex);
    return 1;
}

int aim_pool_end(const struct aim_driver *driver, void *pool, uint64_t bytes, uint64_t pointer)
{
    uint64_t growth = whole_grains(driver, bytes);
    pthread_mutex_lock(&pools_mutex);
    struct aim_entry entry = pool_entry(pool, 0);
    entry.pool.growing -= growth < entry.pool.growing ? growth : entry.pool.growing;
    entry.pool.live += pointer == 0 ? 0 : bytes;
    entry.pool.grains += pointer == 0 ? 0 : growth;
    int fits = settle(driver, &entry);
    if (!fits) { /* the pool grew by more than was asked for: give back what it does not need */
        INSIDE(driver->pool_trim(pool, 0));
        fits = settle(driver, &entry);
    }
    if (!fits && pointer != 0) {
        aim_count_refusal(entry.device);
        release_from(driver, &entry, bytes);
    } else if (pointer != 0) {
        struct aim_entry held = {.kind = K_POOLED, .key = pointer, .device = entry.device, .bytes = bytes};
        held.of = (uint64_t)(uintptr_t)pool;
        aim_allocation_put(&held);
    }
    aim_allocation_put(&entry);
    pthread_mutex_unlock(&pools_mutex);
    return fits;
}

/* The bytes stay charged until the pool releases them, which it does at a synchronisation. */
void aim_pool_freed(const struct aim_driver *driver, const struct aim_entry *held)
{
    struct aim_entry pool;
    pthread_mutex_lock(&pools_mutex);
    if (aim_allocation_get(K_POOL, held->of, &pool)) {
        release_from(driver, &pool, held->bytes);
        aim_allocation_put(&pool);
    }
    pthread_mutex_unlock(&pools_mutex);
    store(&pools_dirty, 1);
}

/* The device that a pool is charged to; -1: it is of host memory. Managed memory lies on any device, whatever place it prefers. */
int aim_pool_home(const struct location *where, int current)
{
    if (where->type == ON_DEVICE)
        return where->id;
    return where->first == MANAGED ? current : -1;
}

void aim_pool_made(const struct aim_driver *driver, void *pool, int device)
{
    (void)driver;
    struct aim_entry entry = {.kind = K_POOL, .key = (uint64_t)(uintptr_t)pool, .device = device};
    aim_allocation_put(&entry);
}

/* Its handle may be given out again: it gets an identity of our own, and is charged until its allocations are freed. */
uint64_t aim_pool_gone(const struct aim_driver *driver, uint64_t key)
{
    struct aim_entry pool;
    uint64_t identity = 0;
    (void)driver;
    pthread_mutex_lock(&pools_mutex);
    if (aim_allocation_take(K_POOL, key, &pool)) {
        identity = pool.key = DYING | ++dying_pools;
        aim_allocation_put(&pool);
        aim_allocations_repoint(K_POOLED, key, identity);
        store(&pools_dirty, 1);
    }
    pthread_mutex_unlock(&pools_mutex);
    return identity;
}

/* The driver did not destroy it. */
void aim_pool_kept(uint64_t key, uint64_t identity)
{
    struct aim_entry pool;
    pthread_mutex_lock(&pools_mutex);
    if (identity != 0 && aim_allocation_take(K_POOL, identity, &pool)) {
        pool.key = key;
        aim_allocation_put(&pool);
        aim_allocations_repoint(K_POOLED, identity, key);
    }
    pthread_mutex_unlock(&pools_mutex);
}

/* A limit of the current context (heap and message buffer of device code, stack per thread) takes device memory. The charge is
 * changed to that of the new value; 0: it would exceed the cap. */
int aim_limit_reserve(const struct aim_driver *driver, int device, int limit, uint64_t value, struct aim_entry *before)
{
    uint64_t unit = 0, included = 0, context = INSIDE(driver->context()), key = (context << 4 | (unsigned)limit) + 1;
    *before = (struct aim_entry){.kind = K_LIMIT, .key = key, .device = device, .context = context};
    struct aim_entry after = *before;
    if (!INSIDE(driver->limit_unit(device, limit, &unit, &included)))
        return 1;
    if (value > included && __builtin_mul_overflow(value - included, unit, &after.bytes))
        return 0;
    int known = aim_allocation_get(K_LIMIT, key, before);
    if (after.bytes > before->bytes && !aim_reserve_or_trim(driver, device, after.bytes - before->bytes))
        return 0;
    if (after.bytes < before->bytes)
        aim_give_back(device, before->bytes - after.bytes);
    if (known || after.bytes != 0)
        aim_allocation_put(&after);
    return 1;
}

/* The driver refused the limit. */
void aim_limit_undo(const struct aim_entry *before)
{
    struct aim_entry now;
    if (!aim_allocation_get(K_LIMIT, before->key, &now))
        return;
    if (now.bytes > before->bytes)
        aim_give_back(before->device, now.bytes - before->bytes);
    else if (!aim_try_reserve(before->device, before->bytes - now.bytes))
        return;
    aim_allocation_put(before);
}

void aim_memory_after_fork(void)
{
    pthread_mutex_init(&pools_mutex, NULL);
    aim_allocations_forget();
    aim_blocks_after_fork();
    aim_contexts_after_fork();
    aim_driver_count_after_fork();
    aim_vmm_after_fork();
    aim_late_after_fork();
}
