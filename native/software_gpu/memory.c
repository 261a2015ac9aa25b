#include "gpu.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RECORDS = 1 << 16, POOLS = 1024 };

static struct state nowhere = {.device_bytes = 80ull << 30, .pool_grain = 1};
struct state *state = &nowhere;

/* What this process holds. A freed address is the next one to be given out, as drivers like to do. */
static struct record {
    uint64_t bytes, pool, references, mapped_by, next_free, graph;
    int device;
    int kind; /* 0 free, 1 plain, 2 pooled, 3 handle, 4 mapping, 5 graph memory */
} records[RECORDS];
static uint64_t used_records = 1, free_record;
static struct {
    uint64_t reserved, used, threshold, grains; /* grains: live bytes, every allocation in whole grains */
    int live, dying, host, device;
} pools[POOLS]; /* the first ones are the devices' own */
static struct {
    uint64_t bytes;     /* the most that is live at once */
    int64_t live;
} graph_nodes[RECORDS];
static uint64_t graph_count = 1, graph_memory;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int slot = -1, slot_pid;
static const char *state_path;

uint64_t sd_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void sd_pause(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    if (ns != 0)
        clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

static pthread_mutex_t claiming = PTHREAD_MUTEX_INITIALIZER;
static void before_fork(void)
{
    pthread_mutex_lock(&claiming);
    pthread_mutex_lock(&mutex);
}
static void after_fork(void)
{
    pthread_mutex_unlock(&mutex);
    pthread_mutex_unlock(&claiming);
}

__attribute__((constructor)) static void start(void)
{
    pthread_atfork(before_fork, after_fork, after_fork);
    for (int i = 0; i < MOST_DEVICES; i++) {
        pools[i].live = 1;
        pools[i].device = i;
    }
    const char *path = getenv("AIMGPU_SOFTWARE_GPU");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    void *at = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED)
        return;
    state = at;
    state_path = path;
}

/* The byte behind the state on which a process keeps a lock for life. */
static struct flock life_of(int which, short kind)
{
    return (struct flock){.l_type = kind, .l_whence = SEEK_SET, .l_start = (off_t)sizeof *state + which, .l_len = 1};
}

/* The lock is that of the open file, and the mapping keeps the file open: descriptors may all be closed, children do not
 * inherit it, and it goes with the process however that ends. */
static uint64_t hold_life(int which)
{
    struct flock life = life_of(which, F_WRLCK);
    int file = state_path == NULL ? -1 : open(state_path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return 0;
    void *kept = fcntl(file, F_OFD_SETLK, &life) == 0 ? mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    return kept != MAP_FAILED && madvise(kept, 4096, MADV_DONTFORK) == 0;
}

int sd_is_dead(int which)
{
    if (!__atomic_load_n(&state->processes[which].locked, __ATOMIC_SEQ_CST))
        return 0;
    int file = open(state_path, O_RDWR | O_CLOEXEC);
    struct flock life = life_of(which, F_WRLCK);
    int dead = file >= 0 && fcntl(file, F_OFD_GETLK, &life) == 0 && life.l_type == F_UNLCK;
    if (file >= 0)
        close(file);
    return dead;
}

/* The sums, from what every process holds. */
static void count_again(void)
{
    uint64_t all = 0, on[MOST_DEVICES] = {0};
    for (int i = 0; i < MOST_PROCESSES; i++)
        if (__atomic_load_n(&state->processes[i].pid, __ATOMIC_SEQ_CST) != 0)
            for (int d = 0; d < MOST_DEVICES; d++)
                on[d] += state->processes[i].used_on[d], all += state->processes[i].used_on[d];
    memcpy(state->used_on, on, sizeof on);
    __atomic_store_n(&state->used, all, __ATOMIC_SEQ_CST);
}

/* One process counts at a time; what one left that was killed meanwhile is counted again. */
static void begin_counting(void)
{
    for (unsigned tries = 0;; tries++) {
        uint64_t holder = 0, own = (uint64_t)slot + 1;
        if (__atomic_compare_exchange_n(&state->counting, &holder, own, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return;
        if (tries % 256 == 255 && holder != own && holder <= MOST_PROCESSES && sd_is_dead((int)holder - 1) &&
            __atomic_compare_exchange_n(&state->counting, &holder, own, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return count_again();
        if (tries > 64)
            sd_pause(20000);
    }
}
static void end_counting(void) { __atomic_store_n(&state->counting, 0, __ATOMIC_SEQ_CST); }

static void empty_slot(int which)
{
    memset(state->processes[which].used_on, 0, sizeof state->processes[which].used_on);
    state->processes[which].used = state->processes[which].launches = state->processes[which].busy_ns = 0;
    __atomic_store_n(&state->processes[which].locked, 0, __ATOMIC_SEQ_CST);
}

/* What the dead held is free again, as on a real driver. */
static void release_the_dead(void)
{
    begin_counting();
    empty_slot(slot);
    for (int i = 0; i < MOST_PROCESSES; i++)
        if (i != slot && sd_is_dead(i)) {
            empty_slot(i);
            __atomic_store_n(&state->processes[i].pid, 0, __ATOMIC_SEQ_CST);
        }
    count_again();
    end_counting();
}

static int claim(void)
{
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < MOST_PROCESSES; i++) {
            uint64_t there = __atomic_load_n(&state->processes[i].pid, __ATOMIC_SEQ_CST);
            if ((there == 0 || (round == 1 && sd_is_dead(i))) &&
                __atomic_compare_exchange_n(&state->processes[i].pid, &there, (uint64_t)getpid(), 0, __ATOMIC_SEQ_CST,
                                            __ATOMIC_SEQ_CST))
                return i;
        }
    abort();
}

int sd_claim_slot(void)
{
    if (__atomic_load_n(&slot_pid, __ATOMIC_ACQUIRE) == getpid())
        return slot;
    pthread_mutex_lock(&claiming);
    if (__atomic_load_n(&slot_pid, __ATOMIC_ACQUIRE) != getpid()) {
        slot = claim();
        release_the_dead();
        __atomic_store_n(&state->processes[slot].locked, hold_life(slot), __ATOMIC_SEQ_CST);
        __atomic_store_n(&slot_pid, getpid(), __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&claiming);
    return slot;
}

uint64_t sd_bytes(int device) { return state->bytes_of[device] != 0 ? state->bytes_of[device] : state->device_bytes; }
int sd_memory(int device, size_t *free_bytes, size_t *bytes)
{
    uint64_t used = __atomic_load_n(&state->used_on[device], __ATOMIC_SEQ_CST);
    *bytes = sd_bytes(device);
    *free_bytes = *bytes > used ? *bytes - used : 0;
    return OK;
}

int sd_take(uint64_t bytes, int device)
{
    sd_claim_slot();
    uint64_t count = __atomic_add_fetch(&state->allocations, 1, __ATOMIC_SEQ_CST);
    uint64_t fail = __atomic_load_n(&state->fail_after, __ATOMIC_SEQ_CST);
    if (fail != 0 && count > fail)
        return OUT_OF_MEMORY;
    sd_pause(state->call_ns);
    begin_counting();
    uint64_t held = state->used_on[device], whole = sd_bytes(device);
    int fits = held <= whole && bytes <= whole - held;
    if (fits) {
        state->processes[slot].used_on[device] += bytes;
        __atomic_add_fetch(&state->processes[slot].used, bytes, __ATOMIC_SEQ_CST);
        state->used_on[device] = held + bytes;
        uint64_t used = __atomic_add_fetch(&state->used, bytes, __ATOMIC_SEQ_CST);
        if (used > state->peak)
            state->peak = used;
    }
    end_counting();
    return fits ? OK : OUT_OF_MEMORY;
}

void sd_give(uint64_t bytes, int device)
{
    sd_claim_slot();
    __atomic_add_fetch(&state->frees, 1, __ATOMIC_SEQ_CST);
    begin_counting();
    state->processes[slot].used_on[device] -= bytes;
    __atomic_sub_fetch(&state->processes[slot].used, bytes, __ATOMIC_SEQ_CST);
    state->used_on[device] -= bytes;
    __atomic_sub_fetch(&state->used, bytes, __ATOMIC_SEQ_CST);
    end_counting();
}

static uint64_t key_of(uint64_t i) { return 0x10000000u + i * 0x1000; }

static struct record *find(uint64_t key, int kind)
{
    uint64_t i = (key - 0x10000000u) / 0x1000;
    return key < 0x10000000u || i >= used_records || records[i].kind != kind ? NULL : &records[i];
}

static uint64_t remember(int kind, uint64_t bytes, int device)
{
    uint64_t i = free_record;
    if (i != 0)
        free_record = records[i].next_free;
    else
        i = used_records++;
    if (i >= RECORDS)
        abort();
    records[i] = (struct record){.kind = kind, .bytes = bytes, .device = device};
    return key_of(i);
}

static void forget(struct record *record)
{
    record->kind = 0;
    record->next_free = free_record;
    free_record = (uint64_t)(record - records);
}

#define LOCKED(expression)                                                                                             \
    ({                                                                                                                 \
        pthread_mutex_lock(&mutex);                                                                                    \
        __typeof__(expression) result_ = (expression);                                                                 \
        pthread_mutex_unlock(&mutex);                                                                                  \
        result_;                                                                                                       \
    })

int sd_allocate(uint64_t bytes, uint64_t *key)
{
    if (bytes == 0)
        return INVALID;
    int device = sd_physical(sd_device());
    if (sd_is_small(bytes))
        return LOCKED(sd_block_allocate(bytes, device, key));
    int code = sd_take(bytes, device);
    if (code == OK)
        *key = LOCKED(remember(1, bytes, device));
    return code;
}

static int free_kind(uint64_t key, int kind)
{
    if (kind == 1 && sd_in_block(key))
        return sd_block_free(key);
    struct record *record = find(key, kind);
    if (record == NULL)
        return INVALID;
    sd_give(record->bytes, record->device);
    forget(record);
    return OK;
}

int sd_free(uint64_t key) { return LOCKED(free_kind(key, 1)); }
int sd_is_pooled(uint64_t key) { return LOCKED(find(key, 2) != NULL); }

static int free_all(int with_handles)
{
    sd_blocks_free_all();
    for (uint64_t i = 1; i < used_records; i++)
        if (records[i].kind == 1 || (with_handles && records[i].kind == 3)) {
            sd_give(records[i].bytes, records[i].device);
            forget(&records[i]);
        }
    return OK;
}
void sd_free_all(int with_handles) { (void)LOCKED(free_all(with_handles)); }

/* Pools grow in grains and keep what is freed until a synchronisation, up to their threshold. */
static int pool_allocate(uint64_t pool, uint64_t bytes, uint64_t *key)
{
    if (pool >= POOLS || !pools[pool].live)
        return INVALID;
    uint64_t need = pools[pool].used + bytes, grain = state->pool_grain == 0 ? 1 : state->pool_grain;
    uint64_t whole = (bytes + grain - 1) / grain * grain;
    if (need > pools[pool].reserved || state->pool_scatters) {
        uint64_t grow = state->pool_scatters ? whole : (need - pools[pool].reserved + grain - 1) / grain * grain;
        int code = pools[pool].host ? OK : sd_take(grow, pools[pool].device);
        if (code != OK)
            return code;
        pools[pool].reserved += grow;
    }
    pools[pool].used = need;
    pools[pool].grains += whole;
    *key = remember(2, bytes, pools[pool].device);
    find(*key, 2)->pool = pool;
    return OK;
}
int sd_pool_allocate(uint64_t pool, uint64_t bytes, uint64_t *key) { return LOCKED(pool_allocate(pool, bytes, key)); }

static int pool_trim(uint64_t pool, uint64_t keep)
{
    uint64_t live = state->pool_scatters ? pools[pool].grains : pools[pool].used, least = live > keep ? live : keep;
    uint64_t grain = state->pool_grain == 0 ? 1 : state->pool_grain;
    least = (least + grain - 1) / grain * grain;
    if (pools[pool].reserved > least) {
        if (!pools[pool].host)
            sd_give(pools[pool].reserved - least, pools[pool].device);
        pools[pool].reserved = least;
    }
    return OK;
}

/* A destroyed pool lives until its last allocation is freed. */
static int pool_free(uint64_t key)
{
    struct record *record = find(key, 2);
    if (record == NULL)
        return INVALID;
    uint64_t pool = record->pool;
    uint64_t grain = state->pool_grain == 0 ? 1 : state->pool_grain;
    pools[pool].used -= record->bytes;
    pools[pool].grains -= (record->bytes + grain - 1) / grain * grain;
    forget(record);
    if (pools[pool].dying) {
        pool_trim(pool, 0);
        if (pools[pool].used == 0)
            pools[pool].live = pools[pool].dying = 0;
    }
    return OK;
}
int sd_pool_free(uint64_t key) { return LOCKED(pool_free(key)); }
static uint64_t checked(uint64_t pool)
{
    if (!LOCKED(pools[pool].live && !pools[pool].dying))
        __atomic_add_fetch(&state->bad_pools, 1, __ATOMIC_SEQ_CST);
    return pool;
}
int sd_pool_trim(uint64_t pool, uint64_t keep)
{
    checked(pool);
    sd_pause(state->call_ns);
    checked(pool);
    return LOCKED(pool_trim(pool, keep));
}
uint64_t sd_pool_reserved(uint64_t pool) { return checked(pool), LOCKED(pools[pool].reserved); }
uint64_t sd_pool_used(uint64_t pool) { return checked(pool), LOCKED(pools[pool].used); }
int sd_pool_threshold(uint64_t pool, uint64_t bytes) { return LOCKED((pools[pool].threshold = bytes, OK)); }

static uint64_t pool_create(int on_device, int device)
{
    for (uint64_t i = MOST_DEVICES; i < POOLS; i++)
        if (!pools[i].live) {
            memset(&pools[i], 0, sizeof pools[i]);
            pools[i].live = 1;
            pools[i].host = !on_device;
            pools[i].device = device;
            return i;
        }
    abort();
}
uint64_t sd_pool_create(int on_device, int device) { return LOCKED(pool_create(on_device, device)); }
uint64_t sd_default_pool(int device) { return (uint64_t)device; }
static int pool_destroy(uint64_t pool)
{
    pool_trim(pool, 0);
    pools[pool].dying = pools[pool].used != 0;
    pools[pool].live = pools[pool].dying;
    return OK;
}
int sd_pool_destroy(uint64_t pool) { return LOCKED(pool_destroy(pool)); }
void sd_pools_synchronise(void)
{
    for (uint64_t pool = 0; pool < POOLS; pool++)
        if (LOCKED(pools[pool].live && !pools[pool].dying && pools[pool].reserved > pools[pool].threshold))
            (void)LOCKED(pool_trim(pool, pools[pool].threshold));
}

/* Memory with handles lives until its last handle and its last mapping are gone. */
int sd_handle_create(uint64_t bytes, uint64_t *handle)
{
    int device = sd_physical(sd_device()), code = sd_take(bytes, device);
    if (code != OK)
        return code;
    *handle = LOCKED(remember(3, bytes, device));
    return LOCKED((find(*handle, 3)->references = 1, OK));
}

static int drop_handle(struct record *record)
{
    if (record->references == 0 && record->mapped_by == 0) {
        sd_give(record->bytes, record->device);
        forget(record);
    }
    return OK;
}
static int handle_release(uint64_t handle)
{
    struct record *record = find(handle, 3);
    if (record == NULL || record->references == 0)
        return INVALID;
    record->references--;
    return drop_handle(record);
}
static int handle_share(uint64_t handle)
{
    struct record *record = find(handle, 3);
    return record == NULL ? INVALID : (record->mapped_by++, OK);
}
int sd_handle_share(uint64_t handle) { return LOCKED(handle_share(handle)); }
int sd_handle_release(uint64_t handle) { return LOCKED(handle_release(handle)); }

static struct {
    uint64_t address, bytes, handle;
} mappings[1024];
static int map(uint64_t address, uint64_t bytes, uint64_t handle)
{
    struct record *record = find(handle, 3);
    if (record == NULL)
        return INVALID;
    for (int i = 0; i < 1024; i++)
        if (mappings[i].address == 0) {
            mappings[i].address = address;
            mappings[i].bytes = bytes;
            mappings[i].handle = handle;
            record->mapped_by++;
            return OK;
        }
    abort();
}
int sd_map(uint64_t address, uint64_t bytes, uint64_t handle) { return LOCKED(map(address, bytes, handle)); }

static int unmap(uint64_t address, uint64_t bytes)
{
    int code = INVALID;
    for (int i = 0; i < 1024; i++)
        if (mappings[i].address >= address && mappings[i].address < address + bytes && mappings[i].address != 0) {
            struct record *record = find(mappings[i].handle, 3);
            mappings[i].address = 0;
            record->mapped_by--;
            code = drop_handle(record);
        }
    return code;
}
int sd_unmap(uint64_t address, uint64_t bytes) { return LOCKED(unmap(address, bytes)); }

static int retain(uint64_t address, uint64_t *handle)
{
    for (int i = 0; i < 1024; i++)
        if (mappings[i].address != 0 && address >= mappings[i].address && address < mappings[i].address + mappings[i].bytes) {
            *handle = mappings[i].handle;
            find(*handle, 3)->references++;
            return OK;
        }
    return INVALID;
}
int sd_retain(uint64_t address, uint64_t *handle) { return LOCKED(retain(address, handle)); }

/* A graph's memory is taken when it first runs, and kept until it is trimmed. What it frees, it can allocate again. */
uint64_t sd_graph(void) { return LOCKED(graph_count++); }
int sd_graph_node(uint64_t graph, uint64_t bytes, uint64_t *key)
{
    pthread_mutex_lock(&mutex);
    graph_nodes[graph].live += (int64_t)bytes;
    if (graph_nodes[graph].live > (int64_t)graph_nodes[graph].bytes)
        graph_nodes[graph].bytes = (uint64_t)graph_nodes[graph].live;
    *key = remember(5, bytes, 0);
    find(*key, 5)->graph = graph;
    pthread_mutex_unlock(&mutex);
    return OK;
}
uint64_t sd_graph_instantiate(uint64_t graph)
{
    uint64_t exec = sd_graph();
    return LOCKED((graph_nodes[exec].bytes = graph_nodes[graph].bytes, exec));
}
int sd_graph_launch(uint64_t exec)
{
    uint64_t need = exec < RECORDS ? graph_nodes[exec].bytes : 0;
    pthread_mutex_lock(&mutex);
    int code = need > graph_memory ? sd_take(need - graph_memory, 0) : OK;
    if (code == OK && need > graph_memory)
        graph_memory = need;
    pthread_mutex_unlock(&mutex);
    return code;
}
static int graph_trim(void)
{
    if (graph_memory != 0)
        sd_give(graph_memory, 0);
    graph_memory = 0;
    return OK;
}
int sd_graph_trim(void) { return LOCKED(graph_trim()); }
uint64_t sd_graph_reserved(void) { return LOCKED(graph_memory); }

/* Stream-ordered: from the pool of the stream's device, or, on a stream that is captured, as a node of the graph. */
int sd_stream_allocate(void *stream, uint64_t pool, uint64_t bytes, uint64_t *key)
{
    uint64_t graph = 0;
    if (sd_capturing(stream, &graph))
        return sd_graph_node(graph, bytes, key);
    return sd_pool_allocate(pool == DEFAULT_POOL ? sd_default_pool(sd_stream_device(stream)) : pool, bytes, key);
}
static int graph_free(uint64_t graph, uint64_t key)
{
    struct record *record = find(key, 5);
    if (record == NULL || record->graph != graph)
        return INVALID;
    graph_nodes[graph].live -= (int64_t)record->bytes;
    forget(record);
    return OK;
}
int sd_stream_free(void *stream, uint64_t key)
{
    uint64_t graph = 0;
    if (sd_capturing(stream, &graph) && LOCKED(find(key, 5) != NULL))
        return LOCKED(graph_free(graph, key));
    return sd_is_pooled(key) ? sd_pool_free(key) : sd_free(key);
}

/* Heap and stacks beyond what a context has at first take memory at once. */
int sd_limit(int limit, uint64_t value)
{
    static uint64_t held[3];
    uint64_t first = limit == 0 ? 1024 : 8u << 20, unit = limit == 0 ? 100 * 1024 : 1;
    uint64_t want = value > first ? (value - first) * unit : 0;
    if (limit < 0 || limit > 2)
        return OK;
    pthread_mutex_lock(&mutex);
    int code = want > held[limit] ? sd_take(want - held[limit], 0) : OK;
    if (want < held[limit])
        sd_give(held[limit] - want, 0);
    if (code == OK)
        held[limit] = want;
    pthread_mutex_unlock(&mutex);
    return code;
}
