/* Threads that launch on streams of their own, capture, wait for events, make and destroy streams, contexts and pools.
 *   mixer THREADS ROUNDS */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxSetCurrent(void *context);
int cuCtxDestroy_v2(void *context);
int cuCtxSynchronize(void);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamDestroy_v2(void *stream);
int cuStreamSynchronize(void *stream);
int cuStreamWaitEvent(void *stream, void *event, unsigned flags);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuGraphDestroy(void *graph);
int cuEventCreate(void **event, unsigned flags);
int cuEventRecord(void *event, void *stream);
int cuEventSynchronize(void *event);
int cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *stream);
int cuMemFreeAsync(uint64_t pointer, void *stream);
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, void *stream);
int cuLaunchKernel(void *f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *s, void **p, void **e);

static unsigned rounds;

static void check(int code)
{
    if (code != 0)
        abort();
}

static void capture(void *stream)
{
    uint64_t pointer;
    void *graph;
    check(cuStreamBeginCapture_v2(stream, 0));
    if (cuMemAllocAsync(&pointer, 1 << 20, stream) == 0)
        check(cuMemFreeAsync(pointer, stream));
    check(cuLaunchKernel((void *)100, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    check(cuStreamEndCapture(stream, &graph));
    check(cuGraphDestroy(graph));
}

static void *mix(void *number)
{
    void *context, *stream, *side, *event;
    unsigned seed = (unsigned)(uintptr_t)number;
    check(cuCtxCreate_v2(&context, 0, 0));
    check(cuCtxSetCurrent(context));
    check(cuEventCreate(&event, 0));
    check(cuStreamCreate(&side, 1));
    for (unsigned i = 0; i < rounds; i++) {
        check(cuStreamCreate(&stream, 1));
        for (int launches = rand_r(&seed) % 4; launches >= 0; launches--)
            check(cuLaunchKernel((void *)(uintptr_t)(20 + 100 * (unsigned)launches), 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        check(cuEventRecord(event, stream));
        check(cuStreamWaitEvent(side, event, 0));
        check(cuMemsetD8Async(8, 0, 64, side));
        if (i % 3 == 0)
            capture(stream);
        if (i % 2 == 0)
            check(cuEventSynchronize(event));
        else
            check(cuStreamSynchronize(side));
        check(cuStreamDestroy_v2(stream));
    }
    check(cuCtxSynchronize());
    check(cuCtxDestroy_v2(context));
    return NULL;
}

int main(int count, char **words)
{
    pthread_t all[64];
    int threads = count < 3 ? 0 : atoi(words[1]);
    if (threads < 1 || threads > 64)
        return 2;
    rounds = (unsigned)atoi(words[2]);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&all[i], NULL, mix, (void *)(uintptr_t)i) != 0)
            return 1;
    for (int i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
    return 0;
}
