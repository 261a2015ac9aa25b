/* What a call costs: `isolation_cost allocate|launch|context|idle COUNT` prints nanoseconds per call, after a byte was read. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
int cuMemFree_v2(uint64_t pointer);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxSynchronize(void);
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra);

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void call(const char *what)
{
    uint64_t pointer;
    void *context;
    if (*what == 'a' && (cuMemAlloc_v2(&pointer, 4 << 20) != 0 || cuMemFree_v2(pointer) != 0))
        exit(1);
    if (*what == 'l' && cuLaunchKernel((void *)7, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0)
        exit(1);
    if (*what == 'c' && cuCtxCreate_v2(&context, 0, 0) != 0)
        exit(1);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    long count = argc > 2 ? atol(argv[2]) : 1;
    if (*what == 'i') { /* a tenant that has used the device, and is idle */
        cuLaunchKernel((void *)7, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        cuCtxSynchronize();
    }
    for (long i = 0; *what != 'c' && i < 2000; i++)
        call(what);
    puts("ready");
    fflush(stdout);
    if (getchar() == EOF || *what == 'i')
        return 0;
    double begun = now(), best = 1e18;
    for (int round = 0; round < (*what == 'c' ? 1 : 200); round++) {
        double from = now();
        for (long i = 0; i < count; i++)
            call(what);
        double took = (now() - from) / (double)count;
        best = took < best ? took : best;
    }
    printf("%.1f %.1f\n", best, (now() - begun) / (double)count / (*what == 'c' ? 1 : 200));
    return 0;
}
