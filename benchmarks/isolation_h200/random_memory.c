/* Random allocations from many threads, against the machine's real driver.
 *   isolation_random_memory THREADS SECONDS SEED KINDS
 * KINDS is a word of letters, one for each kind of allocation that is made:
 *   s small blocks   p plain memory   a stream-ordered, from the device's own pool   m created and mapped   r arrays
 *   t streams with an event each      o stream-ordered, from a pool of its own that is destroyed while its memory lives
 * Prints READY, waits for a line and works. Prints HELD while all threads keep what they have, waits for a line and frees
 * everything. Prints FREED, waits for a line, and prints how many calls were granted and refused. */
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

enum { HELD = 8, MIB = 1 << 20, NOTHING = 0 };

static struct {
    int (*init)(unsigned), (*retain)(void **, int), (*set)(void *), (*sync)(void);
    int (*alloc)(uint64_t *, size_t), (*free)(uint64_t);
    int (*alloc_async)(uint64_t *, size_t, void *), (*free_async)(uint64_t, void *);
    int (*pool_create)(void **, const void *), (*pool_destroy)(void *), (*alloc_pool)(uint64_t *, size_t, void *, void *);
    int (*create)(uint64_t *, size_t, const void *, uint64_t), (*release)(uint64_t);
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, uint64_t), (*unreserve)(uint64_t, size_t);
    int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t), (*unmap)(uint64_t, size_t);
    int (*array)(void **, const void *), (*array_free)(void *);
    int (*stream)(void **, unsigned), (*stream_free)(void *);
    int (*event)(void **, unsigned), (*event_free)(void *), (*record)(void *, void *);
} cu;
static void *context;
static unsigned seconds, first_seed;
static const char *kinds;
static uint64_t granted, refused, failed;
static pthread_barrier_t held_barrier, free_barrier;

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
    char kind;
    uint64_t pointer;
    void *event;
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

static int take_array(struct holding *held, unsigned *seed)
{
    struct {
        size_t width, height;
        unsigned format, channels;
    } shape = {64u << rand_r(seed) % 8, 0, 0x20, 1};
    shape.height = held->bytes / (4 * shape.width) % 32768 + 1;
    return note(cu.array((void **)&held->pointer, &shape));
}

/* What a stream takes may be taken when it is first used. */
static int take_stream(struct holding *held)
{
    if (!note(cu.stream((void **)&held->pointer, 1)))
        return 0;
    if (cu.event(&held->event, 0) != 0 || cu.record(held->event, (void *)held->pointer) != 0)
        note(1);
    return 1;
}

static void take(struct holding *held, unsigned *seed)
{
    char kind = kinds[(unsigned)rand_r(seed) % strlen(kinds)];
    int taken = 0;
    held->bytes = (size_t)(1 + rand_r(seed) % 96) * MIB + (size_t)(rand_r(seed) % 4096);
    if (kind == 's')
        taken = note(cu.alloc(&held->pointer, held->bytes = (size_t)1 + ((size_t)rand_r(seed) % MIB >> rand_r(seed) % 12)));
    else if (kind == 'p')
        taken = note(cu.alloc(&held->pointer, held->bytes));
    else if (kind == 'a')
        taken = note(cu.alloc_async(&held->pointer, held->bytes, NULL));
    else if (kind == 'o')
        taken = take_from_pool(held);
    else if (kind == 'm')
        taken = take_mapped(held);
    else if (kind == 'r')
        taken = take_array(held, seed);
    else
        taken = take_stream(held);
    held->kind = taken ? kind : NOTHING;
}

static void let_go(struct holding *held)
{
    int code = 0;
    if (held->kind == 's' || held->kind == 'p')
        code = cu.free(held->pointer);
    else if (held->kind == 'a' || held->kind == 'o')
        code = cu.free_async(held->pointer, NULL);
    else if (held->kind == 'm')
        code = cu.unmap(held->pointer, held->bytes) != 0 ? 1 : cu.unreserve(held->pointer, held->bytes);
    else if (held->kind == 'r')
        code = cu.array_free((void *)held->pointer);
    else if (held->kind == 't')
        code = cu.event_free(held->event) != 0 ? 1 : cu.stream_free((void *)held->pointer);
    if (code != 0)
        note(code);
    held->kind = NOTHING;
}

static void *work(void *number)
{
    struct holding held[HELD] = {{NOTHING, 0, NULL, 0}};
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
    pthread_barrier_wait(&held_barrier);
    pthread_barrier_wait(&free_barrier);
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

static void report(const char *word)
{
    char line[64];
    puts(word);
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) == NULL)
        exit(1);
}

static void find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        exit(2);
#define FIND(member, name) *(void **)&cu.member = find(library, name)
    FIND(init, "cuInit"), FIND(retain, "cuDevicePrimaryCtxRetain"), FIND(set, "cuCtxSetCurrent"), FIND(sync, "cuCtxSynchronize");
    FIND(alloc, "cuMemAlloc_v2"), FIND(free, "cuMemFree_v2");
    FIND(alloc_async, "cuMemAllocAsync"), FIND(free_async, "cuMemFreeAsync");
    FIND(pool_create, "cuMemPoolCreate"), FIND(pool_destroy, "cuMemPoolDestroy"), FIND(alloc_pool, "cuMemAllocFromPoolAsync");
    FIND(create, "cuMemCreate"), FIND(release, "cuMemRelease");
    FIND(reserve, "cuMemAddressReserve"), FIND(unreserve, "cuMemAddressFree"), FIND(map, "cuMemMap"), FIND(unmap, "cuMemUnmap");
    FIND(array, "cuArrayCreate_v2"), FIND(array_free, "cuArrayDestroy");
    FIND(stream, "cuStreamCreate"), FIND(stream_free, "cuStreamDestroy_v2");
    FIND(event, "cuEventCreate"), FIND(event_free, "cuEventDestroy_v2"), FIND(record, "cuEventRecord");
}

int main(int count, char **words)
{
    pthread_t all[256];
    int threads = count < 5 ? 0 : atoi(words[1]);
    signal(SIGSEGV, crashed);
    signal(SIGABRT, crashed);
    if (threads < 1 || threads > 256 || words[4][0] == 0 || words[4][strspn(words[4], "spamrto")] != 0)
        return 2;
    seconds = (unsigned)atoi(words[2]);
    first_seed = 1000 * (unsigned)atoi(words[3]);
    kinds = words[4];
    find_driver();
    if (cu.init(0) != 0 || cu.retain(&context, 0) != 0 || cu.set(context) != 0)
        return 1;
    pthread_barrier_init(&held_barrier, NULL, (unsigned)threads + 1);
    pthread_barrier_init(&free_barrier, NULL, (unsigned)threads + 1);
    report("READY");
    for (int i = 0; i < threads; i++)
        if (pthread_create(&all[i], NULL, work, (void *)(uintptr_t)i) != 0)
            return 1;
    pthread_barrier_wait(&held_barrier);
    report("HELD");
    pthread_barrier_wait(&free_barrier);
    for (int i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
    cu.sync();
    report("FREED");
    printf("{\"granted\": %llu, \"refused\": %llu, \"failed\": %llu}\n", (unsigned long long)granted,
           (unsigned long long)refused, (unsigned long long)failed);
    return 0;
}
