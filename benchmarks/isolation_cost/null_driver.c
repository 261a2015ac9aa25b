/* A driver that does nothing, so that only the interposer's own time is measured. A launch is said to take two microseconds. */
#include <stdint.h>
#include <stddef.h>
#include <string.h>

static uint64_t launches, next_address = 1 << 21, next_handle = 1;
static uint64_t events[64];

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return memset(uuid, 0xa0 + device, 16), 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)0x1000, 0; }
int cuCtxPushCurrent_v2(void *context) { return (void)context, 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = (void *)0x1000, 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { return (void)flags, (void)device, *context = (void *)(0x2000 + next_handle++), 0; }
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) { return (void)bytes, *pointer = next_address += 1 << 21, 0; }
int cuMemFree_v2(uint64_t pointer) { return (void)pointer, 0; }
int cuStreamGetCaptureInfo_v2(void *s, int *status, uint64_t *id, void **g, void **d, size_t *n)
{
    return (void)s, (void)id, (void)d, (void)n, *status = 0, *g = NULL, 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, 0; }
int cuEventCreate(void **event, unsigned flags) { return (void)flags, *event = (void *)next_handle++, 0; }
int cuEventDestroy_v2(void *event) { return (void)event, 0; }
int cuEventRecord(void *event, void *stream) { return (void)stream, events[(uint64_t)event % 64] = launches, 0; }
int cuEventQuery(void *event) { return (void)event, 0; }
int cuEventElapsedTime(float *ms, void *from, void *to)
{
    return *ms = (float)(events[(uint64_t)to % 64] - events[(uint64_t)from % 64]) * 0.002f, 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra)
{
    return (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)parameters, (void)extra,
           launches++, 0;
}
int cuCtxSynchronize(void) { return 0; }
