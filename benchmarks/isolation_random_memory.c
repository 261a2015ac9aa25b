/* Random allocations of every kind from many threads, against the machine's real driver.
 *   isolation_random_memory THREADS SECONDS SEED KINDS
 * KINDS 5 is every kind; 4 leaves out pools that are destroyed while their memory lives.
 * Prints READY, waits for a line, works, frees everything, and prints how many calls were granted and refused. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HELD = 8, MIB = 1 << 20 };
enum kind { NOTHING, PLAIN, POOLED, MAPPED, ARRAY, FROM_POOL };

static struct {
    int (*init)(unsigned), (*retain)(void **, int), (*set)(void *), (*sync)(void);
    int (*alloc)(uint64_t *, size_t), (*free)(uint64_t);
    int (*alloc_async)(uint64_t *, size_t, void *), (*free_async)(uint64_t, void *);
    int (*pool_create)(void **, const void *), (*pool_destroy)(void *), (*alloc_pool)(uint64_t *, size_t, void *, void *);
    int (*create)(uint64_t *, size_t, const void *, uint64_t), (*release)(uint64_t);
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, uint64_t), (*unreserve)(uint64_t, size_t);
    int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t), (*unmap)(uint64_t, size_t);
    int (*array)(void **, const void *), (*array_free)(void *);
} cu;
static void *context;
static unsigned seconds, first_seed, kinds;
static uint64_t granted, refused, failed;

static void *find(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "no %s\n", name);
        exit(2);
    }
    return found;
}

struct holding {
    enum kind kind;
    uint64_t pointer;
    size_t bytes;
};

static int note(int code)
{
    __atomic_add_fetch(code == 0 ? &granted : code == 2 ? &refused : &failed, 1, __ATOMIC_RELAXED);
    if (code != 0 && code != 2)
        fprintf(stderr, "code %d\n", code);
    return code == 0;
}

static int take_mapped(struct holding *held)
{
    static const int where[64] = {1, 0, 1, 0}; /* pinned, device 0 */
    uint64_t handle;
    held->bytes = (held->bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    if (!note(cu.create(&handle, held->bytes, where, 0)))
        return 0;
    int code = cu.reserve(&held->pointer, held->bytes, 0, 0, 0);
    if (code == 0 && (code = cu.map(held->pointer, held->bytes, 0, handle, 0)) != 0)
        cu.unreserve(held->pointer, held->bytes);
    cu.release(handle);
    if (code != 0)
        note(code);
    return code == 0;
}

/* A pool of its own that is destroyed while its memory lives. */
static int take_from_pool(struct holding *held)
{
    static const int where[64] = {1, 0, 1, 0};
    void *pool;
    if (!note(cu.pool_create(&pool, where)))
        return 0;
    int taken = note(cu.alloc_pool(&held->pointer, held->bytes, pool, NULL));
    note(cu.pool_destroy(pool));
    return taken;
}

static void take(struct holding *held, unsigned *seed)
{
    held->bytes = (size_t)(1 + rand_r(seed) % 96) * MIB + (size_t)(rand_r(seed) % 4096);
    enum kind kind = (enum kind)(1 + (unsigned)rand_r(seed) % kinds);
    int taken = 0;
    if (kind == PLAIN)
        taken = note(cu.alloc(&held->pointer, held->bytes));
    else if (kind == POOLED)
        taken = note(cu.alloc_async(&held->pointer, held->bytes, NULL));
    else if (kind == FROM_POOL)
        taken = take_from_pool(held);
    else if (kind == MAPPED)
        taken = take_mapped(held);
    else {
        struct {
            size_t width, height;
            unsigned format, channels;
        } shape = {4096, (held->bytes / 16384) + 1, 0x20, 1};
        taken = note(cu.array((void **)&held->pointer, &shape));
    }
    held->kind = taken ? kind : NOTHING;
}

static void let_go(struct holding *held)
{
    int code = 0;
    if (held->kind == PLAIN)
        code = cu.free(held->pointer);
    else if (held->kind == POOLED || held->kind == FROM_POOL)
        code = cu.free_async(held->pointer, NULL);
    else if (held->kind == MAPPED)
        code = cu.unmap(held->pointer, held->bytes) != 0 ? 1 : cu.unreserve(held->pointer, held->bytes);
    else if (held->kind == ARRAY)
        code = cu.array_free((void *)held->pointer);
    if (code != 0)
        note(code);
    held->kind = NOTHING;
}

static void *work(void *number)
{
    struct holding held[HELD] = {{NOTHING, 0, 0}};
    unsigned seed = first_seed + (unsigned)(uintptr_t)number;
    time_t end = time(NULL) + (time_t)seconds;
    cu.set(context);
    while (time(NULL) < end) {
        struct holding *one = &held[rand_r(&seed) % HELD];
        if (one->kind == NOTHING)
            take(one, &seed);
        else
            let_go(one);
        if (rand_r(&seed) % 64 == 0)
            cu.sync();
    }
    for (int i = 0; i < HELD; i++)
        let_go(&held[i]);
    return NULL;
}

/* Where it crashed, for a machine without a debugger. */
static void crashed(int number)
{
    void *frames[64];
    backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
    signal(number, SIG_DFL);
    raise(number);
}

int main(int count, char **words)
{
    signal(SIGSEGV, crashed);
    signal(SIGABRT, crashed);
    pthread_t all[256];
    if (count < 5 || atoi(words[1]) > 256 || atoi(words[4]) < 1 || atoi(words[4]) > 5)
        return 2;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        return 2;
#define FIND(member, name) *(void **)&cu.member = find(library, name)
    FIND(init, "cuInit"), FIND(retain, "cuDevicePrimaryCtxRetain"), FIND(set, "cuCtxSetCurrent"), FIND(sync, "cuCtxSynchronize");
    FIND(alloc, "cuMemAlloc_v2"), FIND(free, "cuMemFree_v2");
    FIND(alloc_async, "cuMemAllocAsync"), FIND(free_async, "cuMemFreeAsync");
    FIND(pool_create, "cuMemPoolCreate"), FIND(pool_destroy, "cuMemPoolDestroy"), FIND(alloc_pool, "cuMemAllocFromPoolAsync");
    FIND(create, "cuMemCreate"), FIND(release, "cuMemRelease");
    FIND(reserve, "cuMemAddressReserve"), FIND(unreserve, "cuMemAddressFree"), FIND(map, "cuMemMap"), FIND(unmap, "cuMemUnmap");
    FIND(array, "cuArrayCreate_v2"), FIND(array_free, "cuArrayDestroy");
    if (cu.init(0) != 0 || cu.retain(&context, 0) != 0 || cu.set(context) != 0)
        return 1;
    puts("READY");
    fflush(stdout);
    char line[64];
    if (fgets(line, sizeof line, stdin) == NULL)
        return 1;
    seconds = (unsigned)atoi(words[2]);
    first_seed = 1000 * (unsigned)atoi(words[3]);
    kinds = (unsigned)atoi(words[4]);
    for (int i = 0; i < atoi(words[1]); i++)
        if (pthread_create(&all[i], NULL, work, (void *)(uintptr_t)i) != 0)
            return 1;
    for (int i = 0; i < atoi(words[1]); i++)
        pthread_join(all[i], NULL);
    cu.sync();
    printf("{\"granted\": %llu, \"refused\": %llu, \"failed\": %llu}\n", (unsigned long long)granted,
           (unsigned long long)refused, (unsigned long long)failed);
    return 0;
}
