/* libamdhip64.so.7, as far as the interposer and its tests look at it. */
#include "standin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POOL(o) ((uint64_t)(o)-0x100)
#define POOL_HANDLE(i) ((void *)((i) + 0x100))

API int hipGetDevice(int *device) { return *device = 0, OK; }
API int hipStreamGetCaptureInfo_v2(void *s, int *status, uint64_t *id, void **graph, void **d, size_t *n)
{
    (void)s, (void)d;
    *status = sd_capturing;
    *id = 1;
    *graph = (void *)sd_captured_graph;
    return *n = 0, OK;
}
API int hipStreamBeginCapture(void *stream, int mode)
{
    (void)stream, (void)mode;
    sd_captured_graph = sd_graph();
    return sd_capturing = 1, OK;
}
API int hipStreamEndCapture(void *stream, void **graph)
{
    (void)stream;
    *graph = (void *)sd_captured_graph;
    return sd_capturing = 0, OK;
}
API int hipThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, OK; }
API int hipEventCreateWithFlags(void **event, unsigned flags) { return (void)flags, *event = sd_event(), OK; }
API int hipEventElapsedTime(float *ms, void *from, void *to) { return *ms = sd_event_elapsed(from, to), OK; }
API int hipMemPoolGetAttribute(void *pool, int attribute, uint64_t *value)
{
    return *value = attribute == 5 ? sd_pool_reserved(POOL(pool)) : sd_pool_used(POOL(pool)), OK;
}
API int hipMemPoolSetAttribute(void *pool, int attribute, uint64_t *value)
{
    return attribute == 4 ? sd_pool_threshold(POOL(pool), *value) : OK;
}
API int hipDeviceGetMemPool(void **pool, int device) { return device == 0 ? (*pool = POOL_HANDLE(0), OK) : INVALID; }
API int hipDeviceGetGraphMemAttribute(int device, int attribute, uint64_t *value)
{
    return (void)device, (void)attribute, *value = sd_graph_reserved(), OK;
}

static int plain(void **p, uint64_t n) { return sd_allocate(n, (uint64_t *)p); }
/* As ROCm does: one entry point of the library calls another through the linker's table, where a preloaded one comes first. */
API int hipMalloc(void **p, size_t n) { return plain(p, n); }
API int hipExtMallocWithFlags(void **p, size_t n, unsigned f) { return (void)f, hipMalloc(p, n); }
API int hipMallocManaged(void **p, size_t n, unsigned f) { return (void)f, hipMalloc(p, n); }
API int hipMemAllocPitch(void **p, size_t *pitch, size_t w, size_t h, unsigned e)
{
    (void)e;
    *pitch = (w + 511) / 512 * 512;
    return hipMalloc(p, *pitch * h);
}
API int hipMallocPitch(void **p, size_t *pitch, size_t w, size_t h) { return hipMemAllocPitch(p, pitch, w, h, 4); }
struct pitched {
    void *pointer;
    size_t pitch, width, height;
};
struct extent {
    size_t w, h, d;
};
struct channels {
    int x, y, z, w, kind;
};
static uint64_t some(uint64_t n) { return n == 0 ? 1 : n; }
static uint64_t width_of(struct channels *c) { return (uint64_t)(c->x + c->y + c->z + c->w) / 8; }
API int hipMalloc3D(struct pitched *p, struct extent e)
{
    p->pitch = (e.w + 511) / 512 * 512;
    return hipMalloc(&p->pointer, p->pitch * some(e.h) * some(e.d));
}
API int hipMallocArray(void **a, struct channels *c, size_t w, size_t h, unsigned f)
{
    return (void)f, plain(a, w * some(h) * width_of(c));
}
API int hipMalloc3DArray(void **a, struct channels *c, struct extent e, unsigned f)
{
    return (void)f, plain(a, e.w * some(e.h) * some(e.d) * width_of(c));
}
struct shape {
    size_t w, h;
    unsigned format, channels;
};
struct shape3 {
    size_t w, h, d;
    unsigned format, channels, flags;
};
static uint64_t bytes_of(unsigned format) { return format == 1 || format == 8 ? 1 : format == 0x20 ? 4 : 2; }
API int hipArrayCreate(void **a, struct shape *s) { return plain(a, s->w * some(s->h) * bytes_of(s->format) * s->channels); }
API int hipArray3DCreate(void **a, struct shape3 *s)
{
    return plain(a, s->w * some(s->h) * some(s->d) * bytes_of(s->format) * s->channels);
}
static uint64_t levels_of(uint64_t w, uint64_t h, uint64_t d, uint64_t each, unsigned levels)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < levels; i++, w = w > 1 ? w / 2 : w, h = h > 1 ? h / 2 : h, d = d > 1 ? d / 2 : d)
        sum += w * some(h) * some(d) * each;
    return sum;
}
API int hipMallocMipmappedArray(void **a, struct channels *c, struct extent e, unsigned levels, unsigned f)
{
    return (void)f, plain(a, levels_of(e.w, e.h, e.d, width_of(c), levels));
}
API int hipMipmappedArrayCreate(void **a, struct shape3 *s, unsigned levels)
{
    return plain(a, levels_of(s->w, s->h, s->d, bytes_of(s->format) * s->channels, levels));
}
static int async(void **p, size_t n, uint64_t pool)
{
    return sd_capturing ? sd_graph_node(sd_captured_graph, n, (uint64_t *)p) : sd_pool_allocate(pool, n, (uint64_t *)p);
}
API int hipMallocAsync(void **p, size_t n, void *s) { return (void)s, async(p, n, 0); }
API int hipMallocFromPoolAsync(void **p, size_t n, void *o, void *s) { return (void)s, async(p, n, POOL(o)); }

API int hipMemCreate(void **h, size_t n, int *where, uint64_t f)
{
    return (void)f, where[2] == 1 ? sd_handle_create(n, (uint64_t *)h) : (*h = (void *)0xabc, OK);
}
API int hipMemMap(void *a, size_t n, size_t o, void *h, uint64_t f)
{
    (void)o, (void)f;
    return (uint64_t)h >= 0x90000000u ? OK : sd_map((uint64_t)a, n, (uint64_t)h);
}
API int hipMemUnmap(void *a, size_t n) { return sd_unmap((uint64_t)a, n); }
API int hipMemRelease(void *h) { return (uint64_t)h >= 0x90000000u ? OK : sd_handle_release((uint64_t)h); }
API int hipMemRetainAllocationHandle(void **h, void *a) { return sd_retain((uint64_t)a, (uint64_t *)h); }
API int hipMemMapArrayAsync(void *l, unsigned n, void *s) { return (void)l, (void)n, (void)s, OK; }
API int hipMemImportFromShareableHandle(void **h, void *o, int t) { return (void)o, (void)t, *h = (void *)0x90000001u, OK; }
API int hipIpcOpenMemHandle(void **p, void *h, unsigned f) { return (void)h, (void)f, *p = (void *)0x90001000u, OK; }
API int hipIpcCloseMemHandle(void *p) { return (void)p, OK; }
API int hipImportExternalMemory(void **m, void *d) { return (void)d, *m = (void *)0x90002000u, OK; }
API int hipDestroyExternalMemory(void *m) { return (void)m, OK; }
API int hipMemPoolImportPointer(void **p, void *o, void *d) { return (void)o, (void)d, *p = (void *)0x90003000u, OK; }
API int hipHostMalloc(void **p, size_t n, unsigned f) { return (void)f, *p = malloc(n), OK; }
API int hipHostAlloc(void **p, size_t n, unsigned f) { return hipHostMalloc(p, n, f); }
API int hipMallocHost(void **p, size_t n) { return hipHostMalloc(p, n, 0); }
API int hipMemAllocHost(void **p, size_t n) { return hipHostMalloc(p, n, 0); }
API int hipHostRegister(void *p, size_t n, unsigned f) { return (void)p, (void)n, (void)f, OK; }
API int hipHostFree(void *p) { return (void)p, OK; }
API int hipFreeHost(void *p) { return (void)p, OK; }
API int hipGraphAddMemFreeNode(void **node, void *g, const void *d, size_t n, void *p)
{
    return (void)g, (void)d, (void)n, (void)p, *node = NULL, OK;
}
API int hipDrvGraphAddMemFreeNode(void **node, void *g, const void *d, size_t n, void *p)
{
    return hipGraphAddMemFreeNode(node, g, d, n, p);
}
API int hipModuleLoad(void **m, const char *path) { return (void)path, *m = NULL, OK; }
API int hipModuleLoadData(void **m, const void *image) { return (void)image, *m = NULL, OK; }
API int hipDeviceSetLimit(int limit, size_t value) { return (void)limit, (void)value, OK; }

static int any_free(void *p) { return sd_is_pooled((uint64_t)p) ? sd_pool_free((uint64_t)p) : sd_free((uint64_t)p); }
API int hipFree(void *p) { return any_free(p); }
API int hipFreeAsync(void *p, void *s) { return (void)s, any_free(p); }
API int hipFreeArray(void *a) { return any_free(a); }
API int hipArrayDestroy(void *a) { return any_free(a); }
API int hipFreeMipmappedArray(void *a) { return any_free(a); }
API int hipMipmappedArrayDestroy(void *a) { return any_free(a); }
API int hipMemPoolCreate(void **o, void *w) { return (void)w, *o = POOL_HANDLE(sd_pool_create()), OK; }
API int hipMemPoolDestroy(void *o) { return sd_pool_destroy(POOL(o)); }
API int hipMemPoolTrimTo(void *o, size_t keep) { return sd_pool_trim(POOL(o), keep); }
API int hipDeviceReset(void) { return sd_free_all(1), OK; }

API int hipGraphCreate(void **g, unsigned f) { return (void)f, *g = (void *)sd_graph(), OK; }
static int node(void **n, void *g, unsigned char *p, size_t at)
{
    uint64_t bytes;
    memcpy(&bytes, p + at, 8);
    return sd_graph_node((uint64_t)g, bytes, (uint64_t *)n);
}
API int hipGraphAddMemAllocNode(void **n, void *g, void *d, size_t c, void *p) { return (void)d, (void)c, node(n, g, p, 104); }
API int hipGraphAddNode(void **n, void *g, void *d, size_t c, int *p)
{
    (void)d, (void)c;
    return *p == 10 ? node(n, g, (unsigned char *)p, 120) : OK;
}
static int exec(void **e, void *g) { return *e = (void *)sd_graph_instantiate((uint64_t)g), OK; }
API int hipGraphInstantiate(void **e, void *g, void *n, char *l, size_t s) { return (void)n, (void)l, (void)s, exec(e, g); }
API int hipGraphInstantiateWithFlags(void **e, void *g, unsigned long long f) { return (void)f, exec(e, g); }
API int hipGraphInstantiateWithParams(void **e, void *g, void *p) { return (void)p, exec(e, g); }
API int hipGraphDestroy(void *g) { return (void)g, OK; }
API int hipGraphExecDestroy(void *e) { return (void)e, OK; }
API int hipDeviceGraphMemTrim(int d) { return (void)d, sd_graph_trim(); }
API int hipMemGetInfo(size_t *f, size_t *t) { return *t = state->device_bytes, *f = *t - state->used, OK; }
API int hipDeviceTotalMem(size_t *t, int d) { return (void)d, *t = state->device_bytes, OK; }
static int properties(char *p, size_t at) { return memset(p, 0, 1472), memcpy(p + at, &state->device_bytes, 8), OK; }
API int hipGetDeviceProperties(char *p, int d) { return (void)d, properties(p, 256); }
API int hipGetDevicePropertiesR0000(char *p, int d) { return (void)d, properties(p, 256); }
API int hipGetDevicePropertiesR0600(char *p, int d) { return (void)d, properties(p, 288); }

struct dim3 {
    uint32_t x, y, z;
};
#define SHAPE const void *f, struct dim3 g, struct dim3 b, void **a
#define NO_SHAPE (void)f, (void)g, (void)b, (void)a, (void)m
API int hipLaunchKernel(SHAPE, size_t m, void *s) { return NO_SHAPE, sd_launch(s); }
API int hipLaunchKernel_spt(SHAPE, size_t m, void *s) { return NO_SHAPE, sd_launch(s); }
API int hipLaunchCooperativeKernel(SHAPE, unsigned m, void *s) { return NO_SHAPE, sd_launch(s); }
API int hipLaunchCooperativeKernel_spt(SHAPE, unsigned m, void *s) { return NO_SHAPE, sd_launch(s); }
API int hipExtLaunchKernel(SHAPE, size_t m, void *s, void *x, void *y, int z)
{
    return NO_SHAPE, (void)x, (void)y, (void)z, sd_launch(s);
}
API int hipLaunchKernelExC(void *c, void *f, void **a) { return (void)c, (void)f, (void)a, sd_launch(NULL); }
API int hipDrvLaunchKernelEx(void *c, void *f, void **p, void **e) { return (void)c, (void)f, (void)p, (void)e, sd_launch(NULL); }
#define SIZES uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz
#define NO_SIZES (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)m
API int hipModuleLaunchKernel(void *f, SIZES, unsigned m, void *s, void **p, void **e)
{
    return NO_SIZES, (void)f, (void)p, (void)e, sd_launch(s);
}
API int hipModuleLaunchCooperativeKernel(void *f, SIZES, unsigned m, void *s, void **p) { return NO_SIZES, (void)f, (void)p, sd_launch(s); }
API int hipExtModuleLaunchKernel(void *f, SIZES, size_t m, void *s, void **p, void **e, void *x, void *y, uint32_t z)
{
    return NO_SIZES, (void)f, (void)p, (void)e, (void)x, (void)y, (void)z, sd_launch(s);
}
API int hipHccModuleLaunchKernel(void *f, SIZES, size_t m, void *s, void **p, void **e, void *x, void *y)
{
    return NO_SIZES, (void)f, (void)p, (void)e, (void)x, (void)y, sd_launch(s);
}
static int graph(void *e, void *s)
{
    int code = sd_graph_launch((uint64_t)e);
    return code == OK ? sd_launch(s) : code;
}
API int hipGraphLaunch(void *e, void *s) { return graph(e, s); }
API int hipGraphLaunch_spt(void *e, void *s) { return graph(e, s); }
API int hipDeviceSynchronize(void) { return sd_synchronise(); }
API int hipStreamSynchronize(void *s) { return (void)s, sd_synchronise(); }
API int hipStreamSynchronize_spt(void *s) { return (void)s, sd_synchronise(); }
API int hipMemcpy(void *t, const void *f, size_t n, int k) { return (void)t, (void)f, (void)n, k == 2 ? sd_synchronise() : OK; }
API int hipMemcpy_spt(void *t, const void *f, size_t n, int k) { return (void)t, (void)f, (void)n, k == 2 ? sd_synchronise() : OK; }
API int hipMemcpyWithStream(void *t, const void *f, size_t n, int k, void *s) { return (void)s, hipMemcpy(t, f, n, k); }
API int hipMemcpyDtoH(void *t, void *f, size_t n) { return hipMemcpy(t, f, n, 2); }
API int hipStreamQuery(void *s) { return (void)s, sd_synchronise(); }
API int hipStreamQuery_spt(void *s) { return (void)s, sd_synchronise(); }
API int hipEventRecord(void *e, void *s) { return (void)s, sd_event_record(e); }
API int hipEventRecord_spt(void *e, void *s) { return (void)s, sd_event_record(e); }
API int hipEventSynchronize(void *e) { return sd_event_wait(e); }
API int hipEventQuery(void *e) { return sd_event_query(e); }
API int hipGetProcAddress(const char *name, void **found, int version, uint64_t flags, void *status)
{
    char text[128];
    void *self = dlopen("libamdhip64.so.7", RTLD_LAZY | RTLD_NOLOAD);
    (void)version, (void)status;
    snprintf(text, sizeof text, "%s_spt", name);
    *found = (flags & 2) != 0 ? dlsym(self, text) : NULL;
    if (*found == NULL)
        *found = dlsym(self, name);
    return *found == NULL ? 500 : OK;
}
