/* What programs do to a GPU, one case per run: `cases NAME [NUMBER...]` prints its figures. It knows nothing of any shim. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxSynchronize(void);
int cuMemGetInfo_v2(size_t *left, size_t *whole);
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
int cuMemFree_v2(uint64_t pointer);
int cuMemAllocManaged(uint64_t *pointer, size_t bytes, unsigned flags);
int cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *stream);
int cuMemFreeAsync(uint64_t pointer, void *stream);
int cuMemAllocPitch_v2(uint64_t *pointer, size_t *pitch, size_t width, size_t height, unsigned element);
int cuArrayCreate_v2(void **array, const void *shape);
int cuArray3DCreate_v2(void **array, const void *shape);
int cuMipmappedArrayCreate(void **array, const void *shape, unsigned levels);
int cuMemCreate(uint64_t *handle, size_t bytes, const void *where, unsigned long long flags);
int cuMemRelease(uint64_t handle);
int cuMemExportToShareableHandle(void *shared, uint64_t handle, int type, unsigned long long flags);
int cuMemImportFromShareableHandle(uint64_t *handle, void *shared, int type);
int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags);
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
int cuMemPoolCreate(void **pool, const void *where);
int cuMemAllocFromPoolAsync(uint64_t *pointer, size_t bytes, void *pool, void *stream);
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra);

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static struct {
    int first, second, type, id;
    unsigned char rest[72];
} on_device = {.first = 1, .type = 1}, managed = {.first = 2};
static const size_t GRAIN = 16 << 20;

/* One allocation of GRAIN bytes; 0: it was given. */
static int allocate(const char *kind)
{
    static void *pool;
    static uint64_t address;
    uint64_t pointer = 0;
    size_t pitch;
    void *made = NULL;
    struct {
        size_t width, height;
        unsigned format, channels;
    } flat = {4096, 1024, 0x20, 1};
    struct {
        size_t width, height, depth;
        unsigned format, channels, flags;
    } deep = {1024, 256, 16, 0x20, 1, 0};
    if (strcmp(kind, "linear") == 0)
        return cuMemAlloc_v2(&pointer, GRAIN);
    if (strcmp(kind, "managed") == 0)
        return cuMemAllocManaged(&pointer, GRAIN, 1);
    if (strcmp(kind, "pitched") == 0)
        return cuMemAllocPitch_v2(&pointer, &pitch, 4096, GRAIN / 4096, 4);
    if (strcmp(kind, "async") == 0)
        return cuMemAllocAsync(&pointer, GRAIN, NULL);
    if (strcmp(kind, "array") == 0)
        return cuArrayCreate_v2(&made, &flat);
    if (strcmp(kind, "array3d") == 0)
        return cuArray3DCreate_v2(&made, &deep);
    if (strcmp(kind, "mipmap") == 0)
        return cuMipmappedArrayCreate(&made, &deep, 1);
    if (strcmp(kind, "handle") == 0)
        return cuMemCreate(&pointer, GRAIN, &on_device, 0);
    if (strcmp(kind, "pool") == 0 || strcmp(kind, "managed_pool") == 0) {
        if (pool == NULL && cuMemPoolCreate(&pool, *kind == 'm' ? (void *)&managed : (void *)&on_device) != 0)
            return 1;
        return cuMemAllocFromPoolAsync(&pointer, GRAIN, pool, NULL);
    }
    if (strcmp(kind, "reimport") == 0) { /* made, exported, let go, imported again */
        uint64_t again = 0;
        int file = -1;
        if (address == 0)
            cuMemAddressReserve(&address, (size_t)1 << 38, 0, 0, 0);
        if (cuMemCreate(&pointer, GRAIN, &on_device, 0) != 0 || cuMemExportToShareableHandle(&file, pointer, 1, 0) != 0)
            return 1;
        cuMemRelease(pointer);
        if (cuMemImportFromShareableHandle(&again, (void *)(intptr_t)file, 1) != 0)
            return 1;
        address += GRAIN;
        return cuMemMap(address - GRAIN, GRAIN, 0, again, 0);
    }
    if (strcmp(kind, "dlvsym") == 0 || strcmp(kind, "dlsym") == 0) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        int (*found)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(library, "cuMemAlloc_v2");
        return found(&pointer, GRAIN);
    }
    exit(2);
}

static long fill(const char *kind, long most)
{
    long count = 0;
    while (count < most && allocate(kind) == 0)
        count++;
    return count;
}

/* Libraries that a program is linked to are initialised before a preloaded one. The first variable asks for it. */
__attribute__((constructor)) static void early(void)
{
    void *context;
    if (getenv("CASES_EARLY") == NULL)
        return;
    cuInit(0);
    cuCtxCreate_v2(&context, 0, 0);
    fill("linear", atol(getenv("CASES_EARLY")));
}

static void launch(uint64_t microseconds, unsigned grid)
{
    if (cuLaunchKernel((void *)microseconds, grid, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0)
        exit(3);
}

/* The software GPU's one kernel whose length is its argument. */
static void launch_for(uint64_t nanoseconds)
{
    void *parameters[] = {&nanoseconds};
    if (cuLaunchKernel((void *)(((uint64_t)1 << 40) - 1), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL) != 0)
        exit(3);
}

static double until;
static void *launch_always(void *microseconds)
{
    while (now() < until) {
        launch((uint64_t)microseconds, 1);
        cuCtxSynchronize();
    }
    return NULL;
}

/* The least of several rounds: other work of the machine is not the shim's. */
#define LEAST(rounds, calls, statement)                                                                                \
    ({                                                                                                                 \
        double least_ = 1e18;                                                                                          \
        for (int round_ = 0; round_ < (rounds); round_++) {                                                            \
            double from_ = now();                                                                                      \
            for (int call_ = 0; call_ < (calls); call_++) {                                                            \
                statement;                                                                                             \
            }                                                                                                          \
            double took_ = (now() - from_) / (calls);                                                                  \
            least_ = took_ < least_ ? took_ : least_;                                                                  \
        }                                                                                                              \
        least_;                                                                                                        \
    })

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "";
    long a = count > 2 ? atol(words[2]) : 0, b = count > 3 ? atol(words[3]) : 0;
    uint64_t pointer, pointers[500];
    size_t left, whole;
    void *context;
    if (getenv("CASES_EARLY") == NULL) {
        double from = now();
        if (cuInit(0) != 0)
            return 4;
        if (cuCtxCreate_v2(&context, 0, 0) != 0)
            return 5;
        if (strcmp(what, "context") == 0)
            printf("%.0f\n", now() - from);
    }
    if (strcmp(what, "allocate") == 0) {
        printf("%.1f\n", LEAST(50, 1, { for (int i = 0; i < 500; i++) if (cuMemAlloc_v2(&pointers[i], 4096) != 0) exit(6); for (int i = 0; i < 500; i++) cuMemFree_v2(pointers[i]); }) / 500);
    } else if (strcmp(what, "pair") == 0) {
        puts("ready"), fflush(stdout), getchar();
        printf("%.1f\n", LEAST(50, 500, if (cuMemAlloc_v2(&pointer, 4 << 20) != 0 || cuMemFree_v2(pointer) != 0) exit(6)));
    } else if (strcmp(what, "info") == 0) {
        printf("%.1f\n", LEAST(50, 500, cuMemGetInfo_v2(&left, &whole)));
    } else if (strcmp(what, "launch") == 0) {
        printf("%.1f\n", LEAST(50, 100, launch(1, 1)));
    } else if (strcmp(what, "refusal") == 0) {
        fill("linear", 1000);
        printf("%.1f\n", LEAST(20, 20, cuMemAlloc_v2(&pointer, GRAIN)));
    } else if (strcmp(what, "release") == 0) { /* so many handles, then each let go */
        uint64_t *handles = malloc(sizeof(uint64_t) * (size_t)a);
        long made = 0;
        while (made < a && cuMemCreate(&handles[made], 2 << 20, &on_device, 0) == 0)
            made++;
        double from = now();
        for (long i = 0; i < made; i++)
            cuMemRelease(handles[i]);
        printf("%.1f\n", made == a ? (now() - from) / (double)made : -1.0);
    } else if (strcmp(what, "fill") == 0) {
        printf("%ld\n", fill(words[2], b));
        fflush(stdout), getchar();
    } else if (strcmp(what, "spin") == 0) { /* launches of A microseconds for B milliseconds, one after the other */
        puts("ready"), fflush(stdout), getchar();
        until = now() + 1e6 * (double)b;
        launch_always((void *)a);
    } else if (strcmp(what, "threads") == 0) {
        pthread_t threads[64];
        long number = count > 4 ? atol(words[4]) : 1;
        puts("ready"), fflush(stdout), getchar();
        until = now() + 1e6 * (double)b;
        for (long i = 0; i < number; i++)
            pthread_create(&threads[i], NULL, launch_always, (void *)a);
        for (long i = 0; i < number; i++)
            pthread_join(threads[i], NULL);
    } else if (strcmp(what, "grows") == 0) { /* one kernel that is short, then A microseconds, without a wait */
        for (int i = 0; i < 300; i++)
            launch_for(2000), i % 20 == 0 ? cuCtxSynchronize() : 0;
        puts("ready"), fflush(stdout), getchar();
        until = now() + 1e6 * (double)b;
        while (now() < until)
            launch_for((uint64_t)a * 1000);
    } else if (strcmp(what, "new_grids") == 0) {
        puts("ready"), fflush(stdout), getchar();
        until = now() + 1e6 * (double)b;
        for (unsigned grid = 1; now() < until; grid++)
            launch((uint64_t)a, grid);
    } else if (strcmp(what, "serve") == 0) { /* requests of ten steps of A microseconds for B milliseconds; each one's length */
        puts("ready"), fflush(stdout), getchar();
        until = now() + 1e6 * (double)b;
        while (now() < until) {
            double from = now();
            for (int step = 0; step < 10; step++) {
                launch((uint64_t)a, 1);
                cuCtxSynchronize();
            }
            printf("%.0f ", now() - from);
            usleep(20000);
        }
        puts("");
    }
    return 0;
}
