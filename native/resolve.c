/* Finds the driver's own functions, and returns ours to a caller that looks one up by name. */
#include "aim.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

/* The versions that every C library has had, so that a library built on a new system loads on an old one. */
#if defined(__x86_64__)
__asm__(".symver dlvsym, dlvsym@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlvsym, dlvsym@GLIBC_2.17");
#endif

#define HOOK(symbol, api, version) extern char symbol[]; /* only the address is used */
#include "functions.def"
#undef HOOK

static const struct {
    const char *symbol;
    void *wrapper;
    enum aim_api api;
    int version;
} hooks[AIM_FUNCTIONS] = {
#define HOOK(symbol, api, version) {#symbol, symbol, AIM_##api, version},
#include "functions.def"
#undef HOOK
};
static void *real[AIM_FUNCTIONS];

typedef void *(*dlsym_function)(void *, const char *);
__attribute__((visibility("hidden"))) dlsym_function aim_real_dlsym;

/* dlsym is ours, so the real one is found by the version it has had on this architecture. */
AIM_UNCHECKED static dlsym_function real_dlsym(void)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    dlsym_function found = __atomic_load_n(&aim_real_dlsym, __ATOMIC_ACQUIRE);
    for (size_t i = 0; found == NULL && i < sizeof versions / sizeof *versions; i++)
        found = (dlsym_function)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    __atomic_store_n(&aim_real_dlsym, found, __ATOMIC_RELEASE);
    return found;
}

typedef void *(*dlopen_function)(const char *, int);
typedef void *(*dlmopen_function)(Lmid_t, const char *, int);
__attribute__((visibility("hidden"))) dlopen_function aim_real_dlopen;
__attribute__((visibility("hidden"))) dlmopen_function aim_real_dlmopen;

AIM_UNCHECKED static void *find_version(const char *name)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.3.4", "GLIBC_2.17"};
    void *found = NULL;
    for (size_t i = 0; found == NULL && i < sizeof versions / sizeof *versions; i++)
        found = dlvsym(RTLD_NEXT, name, versions[i]);
    return found;
}

AIM_UNCHECKED static dlopen_function real_dlopen(void)
{
    if (__atomic_load_n(&aim_real_dlopen, __ATOMIC_ACQUIRE) == NULL)
        __atomic_store_n(&aim_real_dlopen, (dlopen_function)find_version("dlopen"), __ATOMIC_RELEASE);
    return aim_real_dlopen;
}

/* The driver's library, whatever its version or the suffix that a package gave its name: libamdhip64.so.7, libamdhip64.so.10,
 * libamdhip64-1a2b3c4d.so. */
struct search {
    const char *stem;
    char path[4096];
};

static int look_at(struct dl_phdr_info *info, size_t size, void *data)
{
    struct search *search = data;
    const char *slash = strrchr(info->dlpi_name, '/'), *name = slash == NULL ? info->dlpi_name : slash + 1;
    size_t stem = strlen(search->stem), length = strlen(info->dlpi_name);
    (void)size;
    if (strncmp(name, search->stem, stem) != 0 || length >= sizeof search->path)
        return 0;
    if (strncmp(name + stem, ".so", 3) != 0 && (name[stem] != '-' || strstr(name, ".so") == NULL))
        return 0;
    memcpy(search->path, info->dlpi_name, length + 1);
    return 1;
}

static void *library(enum aim_api api)
{
    static const char *const stems[AIM_APIS] = {[AIM_CUDA] = "libcuda", [AIM_HIP] = "libamdhip64", [AIM_NVML] = "libnvidia-ml"};
    static void *handles[AIM_APIS];
    void *handle = __atomic_load_n(&handles[api], __ATOMIC_ACQUIRE);
    if (handle != NULL)
        return handle;
    struct search search = {.stem = stems[api]};
    if (dl_iterate_phdr(look_at, &search))
        handle = real_dlopen()(search.path, RTLD_LAZY | RTLD_NOLOAD);
    __atomic_store_n(&handles[api], handle, __ATOMIC_RELEASE);
    return handle;
}

int aim_driver_loaded(enum aim_api api) { return library(api) != NULL; }

int aim_load_library(enum aim_api api, const char *name)
{
    return library(api) != NULL || (real_dlopen()(name, RTLD_LAZY | RTLD_LOCAL) != NULL && library(api) != NULL);
}

void *aim_driver_symbol(enum aim_api api, const char *name)
{
    void *handle = library(api);
    void *found = handle == NULL ? NULL : real_dlsym()(handle, name);
    return found != NULL ? found : real_dlsym()(RTLD_NEXT, name);
}

void *aim_real(enum aim_function function)
{
    void *found = __atomic_load_n(&real[function], __ATOMIC_ACQUIRE);
    if (found != NULL)
        return found;
    found = aim_driver_symbol(hooks[function].api, hooks[function].symbol);
    if (found == hooks[function].wrapper)
        found = NULL;
    __atomic_store_n(&real[function], found, __ATOMIC_RELEASE);
    return found;
}

/* What a wrapper returns where no library with the function is loaded. */
int aim_missing(enum aim_function function, int code)
{
    static int said;
    if (aim_enabled() && !aim_driver_loaded(hooks[function].api))
        aim_say_once(&said, "%s is called, but the library that provides it was not found among the loaded ones",
                     hooks[function].symbol);
    return code;
}

/* 0: other name; 1: the plain symbol; 2: the symbol for per-thread default streams. */
static int names_base(const char *symbol, const char *base)
{
    size_t length = strlen(base);
    if (strncmp(symbol, base, length) != 0)
        return 0;
    const char *rest = symbol + length;
    if (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '1' && rest[2] <= '9')
        rest += 3;
    if (*rest == 0)
        return 1;
    return strcmp(rest, "_ptsz") == 0 || strcmp(rest, "_ptds") == 0 || strcmp(rest, "_spt") == 0 ? 2 : 0;
}

/* What a lookup by name should return instead of `found`. Lookups name a function without its version suffix. */
void *aim_wrapper_for(enum aim_api api, const char *base, void *found, int version, int per_thread)
{
    int best = -1;
    for (int i = 0; i < AIM_FUNCTIONS; i++) {
        if (hooks[i].api != api)
            continue;
        if (found == hooks[i].wrapper)
            return found;
        int form = names_base(hooks[i].symbol, base);
        if (form != 0 && aim_real((enum aim_function)i) == found)
            return hooks[i].wrapper;
        if (form == 0 || hooks[i].version > version || (form == 2 && !per_thread))
            continue;
        if (best < 0 || hooks[i].version >= hooks[best].version)
            best = i;
    }
    if (best < 0)
        return found;
    if (strcmp(base, "cuGraphInstantiate") == 0 && version >= 12000)
        best = F_cuGraphInstantiateWithFlags; /* renamed in CUDA 12: same name, other parameters */
    __atomic_store_n(&real[best], found, __ATOMIC_RELEASE); /* no symbol of that address: believe the driver */
    return hooks[best].wrapper;
}

void *aim_dlsym_lookup(void *handle, const char *name);
int aim_dlopen_mask(void);
Lmid_t aim_dlmopen_namespace(Lmid_t wanted);

/* Called by dlsym below, for every lookup of the program: NULL leaves the lookup to the real dlsym. */
__attribute__((visibility("hidden"), used)) AIM_UNCHECKED void *aim_dlsym_lookup(void *handle, const char *name)
{
    dlsym_function next = real_dlsym();
    if (name == NULL || aim_depth > 0)
        return NULL;
    if (!(name[0] == 'c' && name[1] == 'u') && !(name[0] == 'h' && name[1] == 'i') && !(name[0] == 'n' && name[1] == 'v'))
        return NULL;
    for (int i = 0; i < AIM_FUNCTIONS; i++) {
        if (strcmp(hooks[i].symbol, name) != 0)
            continue;
        if (handle == RTLD_DEFAULT || handle == RTLD_NEXT)
            return aim_real((enum aim_function)i) == NULL ? NULL : hooks[i].wrapper;
        void *found = next(handle, name);
        if (found == NULL)
            return NULL;
        if (found != hooks[i].wrapper && __atomic_load_n(&real[i], __ATOMIC_ACQUIRE) == NULL)
            __atomic_store_n(&real[i], found, __ATOMIC_RELEASE);
        return hooks[i].wrapper;
    }
    return NULL;
}

/* A library that is loaded with RTLD_DEEPBIND would bind to the driver directly. */
__attribute__((visibility("hidden"), used)) AIM_UNCHECKED int aim_dlopen_mask(void)
{
    real_dlopen();
    return aim_enabled() ? ~RTLD_DEEPBIND : ~0;
}

/* A namespace of its own would have a driver of its own, that nothing limits: it is loaded into the program's namespace. */
__attribute__((visibility("hidden"), used)) AIM_UNCHECKED Lmid_t aim_dlmopen_namespace(Lmid_t wanted)
{
    static int said;
    if (__atomic_load_n(&aim_real_dlmopen, __ATOMIC_ACQUIRE) == NULL)
        __atomic_store_n(&aim_real_dlmopen, (dlmopen_function)find_version("dlmopen"), __ATOMIC_RELEASE);
    if (!aim_enabled() || wanted == LM_ID_BASE)
        return wanted;
    aim_say_once(&said, "dlmopen loads into the program's own namespace, since limits would not hold in another one");
    return LM_ID_BASE;
}

/* Jumps instead of calls: the real functions look at their return address to know the caller (RTLD_NEXT, RUNPATH). */
#if defined(__x86_64__)
__asm__(".text\n.globl dlsym\n.type dlsym,@function\ndlsym:\n"
        "endbr64\n"
        "push %rdi\npush %rsi\nsub $8, %rsp\n"
        "call aim_dlsym_lookup\n"
        "add $8, %rsp\npop %rsi\npop %rdi\n"
        "test %rax, %rax\njnz 1f\n"
        "jmp *aim_real_dlsym(%rip)\n"
        "1: ret\n.size dlsym, . - dlsym\n"
        ".globl dlopen\n.type dlopen,@function\ndlopen:\n"
        "endbr64\n"
        "push %rdi\npush %rsi\nsub $8, %rsp\n"
        "call aim_dlopen_mask\n"
        "add $8, %rsp\npop %rsi\npop %rdi\n"
        "and %eax, %esi\n"
        "jmp *aim_real_dlopen(%rip)\n.size dlopen, . - dlopen\n"
        ".globl dlmopen\n.type dlmopen,@function\ndlmopen:\n"
        "endbr64\n"
        "push %rdi\npush %rsi\npush %rdx\n"
        "call aim_dlmopen_namespace\n"
        "pop %rdx\npop %rsi\npop %rdi\n"
        "mov %rax, %rdi\n"
        "jmp *aim_real_dlmopen(%rip)\n.size dlmopen, . - dlmopen\n");
#elif defined(__aarch64__)
__asm__(".text\n.globl dlsym\n.type dlsym,%function\ndlsym:\n"
        "hint #34\n"
        "stp x29, x30, [sp, #-32]!\nstp x0, x1, [sp, #16]\n"
        "bl aim_dlsym_lookup\n"
        "mov x16, x0\n"
        "ldp x0, x1, [sp, #16]\nldp x29, x30, [sp], #32\n"
        "cbnz x16, 1f\n"
        "adrp x16, aim_real_dlsym\nldr x16, [x16, #:lo12:aim_real_dlsym]\nbr x16\n"
        "1: mov x0, x16\nret\n.size dlsym, . - dlsym\n"
        ".globl dlopen\n.type dlopen,%function\ndlopen:\n"
        "hint #34\n"
        "stp x29, x30, [sp, #-32]!\nstp x0, x1, [sp, #16]\n"
        "bl aim_dlopen_mask\n"
        "mov w16, w0\n"
        "ldp x0, x1, [sp, #16]\nldp x29, x30, [sp], #32\n"
        "and w1, w1, w16\n"
        "adrp x16, aim_real_dlopen\nldr x16, [x16, #:lo12:aim_real_dlopen]\nbr x16\n.size dlopen, . - dlopen\n"
        ".globl dlmopen\n.type dlmopen,%function\ndlmopen:\n"
        "hint #34\n"
        "stp x29, x30, [sp, #-48]!\nstp x0, x1, [sp, #16]\nstr x2, [sp, #32]\n"
        "bl aim_dlmopen_namespace\n"
        "ldp x16, x1, [sp, #16]\nldr x2, [sp, #32]\nldp x29, x30, [sp], #48\n"
        "adrp x16, aim_real_dlmopen\nldr x16, [x16, #:lo12:aim_real_dlmopen]\nbr x16\n.size dlmopen, . - dlmopen\n");
#else
#error "x86-64 and arm64 only"
#endif
