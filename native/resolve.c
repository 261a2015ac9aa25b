/* Finds the driver's own functions, and gives ours to whoever looks one up by name. */
#include "aim.h"

#include <dlfcn.h>
#include <string.h>

/* The versions that every C library has had, so that a library built on a new system loads on an old one. */
#if defined(__x86_64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlvsym, dlvsym@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.17");
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

static void *library(enum aim_api api)
{
    static const char *const names[AIM_APIS][5] = {
        [AIM_CUDA] = {"libcuda.so.1", "libcuda.so"},
        [AIM_HIP] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"},
        [AIM_NVML] = {"libnvidia-ml.so.1", "libnvidia-ml.so"},
    };
    static void *handles[AIM_APIS];
    void *handle = __atomic_load_n(&handles[api], __ATOMIC_ACQUIRE);
    for (int i = 0; handle == NULL && i < 5 && names[api][i] != NULL; i++)
        handle = dlopen(names[api][i], RTLD_LAZY | RTLD_NOLOAD); /* only if the program has loaded it */
    __atomic_store_n(&handles[api], handle, __ATOMIC_RELEASE);
    return handle;
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

/* What a lookup by name should answer instead of `found`. Lookups name a function without its version suffix. */
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

/* Called by dlsym below, for every lookup of the program: NULL means that the real dlsym answers. */
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

/* A jump instead of a call: the real dlsym looks at its return address to know who RTLD_NEXT is relative to. */
#if defined(__x86_64__)
__asm__(".text\n.globl dlsym\n.type dlsym,@function\ndlsym:\n"
        "endbr64\n"
        "push %rdi\npush %rsi\nsub $8, %rsp\n"
        "call aim_dlsym_lookup\n"
        "add $8, %rsp\npop %rsi\npop %rdi\n"
        "test %rax, %rax\njnz 1f\n"
        "jmp *aim_real_dlsym(%rip)\n"
        "1: ret\n.size dlsym, . - dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n.globl dlsym\n.type dlsym,%function\ndlsym:\n"
        "hint #34\n"
        "stp x29, x30, [sp, #-32]!\nstp x0, x1, [sp, #16]\n"
        "bl aim_dlsym_lookup\n"
        "mov x16, x0\n"
        "ldp x0, x1, [sp, #16]\nldp x29, x30, [sp], #32\n"
        "cbnz x16, 1f\n"
        "adrp x16, aim_real_dlsym\nldr x16, [x16, #:lo12:aim_real_dlsym]\nbr x16\n"
        "1: mov x0, x16\nret\n.size dlsym, . - dlsym\n");
#else
#error "x86-64 and arm64 only"
#endif
