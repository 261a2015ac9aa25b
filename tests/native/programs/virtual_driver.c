/* libcuda.so.1 on a clock of its own: one queue, first come, first served. A launch takes as long as was said before it. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { EVENTS = 256, ENDS = 4096, CALL_NS = 1000 };
uint64_t virtual_now, virtual_free_at, virtual_length, virtual_ends[ENDS], virtual_launches;
static uint64_t events[EVENTS], next_event = 1;

int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return memset(uuid, 0xa0 + device, 16), 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)0x1000, 0; }
int cuCtxPushCurrent_v2(void *context) { return (void)context, 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = (void *)0x1000, 0; }
int cuStreamGetCaptureInfo_v2(void *s, int *status, uint64_t *id, void **g, void **d, size_t *n)
{
    return (void)s, (void)id, (void)d, (void)n, *status = 0, *g = NULL, 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, 0; }
int cuEventCreate(void **event, unsigned flags) { return (void)flags, *event = (void *)(next_event++ % EVENTS), 0; }
int cuEventDestroy_v2(void *event) { return (void)event, 0; }
int cuEventRecord(void *event, void *stream)
{
    return (void)stream, events[(uint64_t)event] = virtual_free_at > virtual_now ? virtual_free_at : virtual_now, 0;
}
int cuEventQuery(void *event) { return events[(uint64_t)event] > virtual_now ? 600 : 0; }
int cuEventElapsedTime(float *ms, void *from, void *to)
{
    return *ms = (float)((double)(events[(uint64_t)to] - events[(uint64_t)from]) / 1e6), 0;
}
static int launch(void)
{
    uint64_t begins = virtual_free_at > virtual_now ? virtual_free_at : virtual_now;
    virtual_free_at = begins + virtual_length;
    virtual_ends[virtual_launches++ % ENDS] = virtual_free_at;
    virtual_now += CALL_NS;
    return 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra)
{
    return (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)parameters,
           (void)extra, launch();
}
int cuGraphLaunch(void *graph, void *stream) { return (void)graph, (void)stream, launch(); }
int cuGraphExecDestroy(void *graph) { return (void)graph, 0; }
int cuModuleUnload(void *code) { return (void)code, 0; }
int cuCtxSynchronize(void) { return virtual_now = virtual_free_at > virtual_now ? virtual_free_at : virtual_now, 0; }
