/* Finds the driver's own functions, and returns ours to a caller that looks one up by name. */
#include "aim.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

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
typedef void *(*dlvsym_function)(void *, const char *, const char *);
typedef void *(*dlopen_function)(const char *, int);
typedef void *(*dlmopen_function)(Lmid_t, const char *, int);
#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN dlsym_function aim_real_dlsym;
HIDDEN dlvsym_function aim_real_dlvsym;
HIDDEN dlopen_function aim_real_dlopen;
HIDDEN dlmopen_function aim_real_dlmopen;

/* Without the C library's functions: sanitizers look names up before their own versions of those work. */
AIM_UNCHECKED static int starts_with(const char *text, const char *start)
{
    while (*start != 0 && *text == *start)
        text++, start++;
    return *start == 0;
}
AIM_UNCHECKED static int is_same(const char *a, const char *b) { return starts_with(a, b) && starts_with(b, a); }

/* A function of one loaded library, by its hash table. */
AIM_UNCHECKED static void *find_in(const struct link_map *map, const char *name)
{
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const uint32_t *table = NULL;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const ElfW(Sym) *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_STRTAB)
            names = (const char *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_GNU_HASH)
            table = (const uint32_t *)entry->d_un.d_ptr;
    }
    if (symbols == NULL || names == NULL || table == NULL || (ElfW(Addr))table < map->l_addr)
        return NULL; /* not relocated yet */
    uint32_t hash = 5381, count = table[0], first = table[1];
    for (const char *at = name; *at != 0; at++)
        hash = hash * 33 + (unsigned char)*at;
    const uint32_t *buckets = (const uint32_t *)(const void *)((const ElfW(Addr) *)(const void *)(table + 4) + table[2]);
    const uint32_t *hashes = buckets + count;
    for (uint32_t i = buckets[hash % count]; i != 0; i++) {
        if ((hashes[i - first] | 1) == (hash | 1) && symbols[i].st_shndx != 0 && is_same(names + symbols[i].st_name, name))
            return (void *)(map->l_addr + symbols[i].st_value);
        if (hashes[i - first] & 1)
            break;
    }
    return NULL;
}

/* The functions of the dynamic linker are ours, so the real ones are found in the C library's own table. They are in libdl before
 * version 2.34 of it. */
AIM_UNCHECKED static void *find_in_c_library(const char *name)
{
    void *found = NULL;
    for (const struct link_map *map = _r_debug.r_map; map != NULL && found == NULL; map = map->l_next) {
        const char *base = map->l_name;
        for (const char *at = map->l_name; *at != 0; at++)
            if (*at == '/')
                base = at + 1;
        if (starts_with(base, "libc.so") || starts_with(base, "libdl.so"))
            found = find_in(map, name);
    }
    return found;
}

#define REAL(name)                                                                                                     \
    AIM_UNCHECKED static name##_function real_##name(void)                                                             \
    {                                                                                                                  \
        if (__atomic_load_n(&aim_real_##name, __ATOMIC_ACQUIRE) == NULL)                                               \
            __atomic_store_n(&aim_real_##name, (name##_function)find_in_c_library(#name), __ATOMIC_RELEASE);           \
        return aim_real_##name;                                                                                        \
    }
REAL(dlsym)
REAL(dlvsym)
REAL(dlopen)
REAL(dlmopen)

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

/* Whether the driver's function is a form that is newer than all forms we know: it has a version number that none of them has. */
static int is_unknown_form(enum aim_api api, const char *base, const void *found)
{
    static const char *const tails[] = {"", "_ptsz", "_ptds", "_spt"};
    char name[128];
    for (int version = 2; version <= 9; version++)
        for (size_t tail = 0; tail < sizeof tails / sizeof *tails; tail++) {
            snprintf(name, sizeof name, "%s_v%d%s", base, version, tails[tail]);
            void *known = NULL;
            for (int i = 0; i < AIM_FUNCTIONS && known == NULL; i++)
                known = strcmp(hooks[i].symbol, name) == 0 ? hooks[i].wrapper : NULL;
            if (known == NULL && aim_driver_symbol(api, name) == found)
                return 1;
        }
    return 0;
}

static int newer_form(const char *name)
{
    static int said;
    aim_say_once(&said, "%s: the driver offers a newer form than this library knows, which is %s", name,
                 aim_fail_closed ? "refused" : "NOT limited");
    return aim_fail_closed;
}

/* What a lookup by name should return instead of `found`. Lookups name a function without its version suffix. A form that is not
 * known has other parameters, so that no wrapper of ours fits it: NULL where limits are promised, else it is passed through. */
void *aim_wrapper_for(enum aim_api api, const char *base, void *found, int version, int per_thread)
{
    int best = -1;
    for (int i = 0; i < AIM_FUNCTIONS; i++) {
        if (hooks[i].api != api)
            continue;
        if (found == hooks[i].wrapper)
            return found;
        int form = names_base(hooks[i].symbol, base);
        if (form != 0 && aim_driver_symbol(api, hooks[i].symbol) == found) {
            __atomic_store_n(&real[i], found, __ATOMIC_RELEASE);
            return hooks[i].wrapper;
        }
        if (form == 0 || hooks[i].version > version || (form == 2 && !per_thread))
            continue;
        if (best < 0 || hooks[i].version >= hooks[best].version)
            best = i;
    }
    if (best < 0)
        return found;
    if ((api == AIM_CUDA && version > AIM_NEWEST_CUDA) || is_unknown_form(api, base, found))
        return newer_form(base) ? NULL : found;
    if (strcmp(base, "cuGraphInstantiate") == 0 && version >= 12000)
        best = F_cuGraphInstantiateWithFlags; /* renamed in CUDA 12: same name, other parameters */
    __atomic_store_n(&real[best], found, __ATOMIC_RELEASE); /* no symbol of that address: believe the driver */
    return hooks[best].wrapper;
}

void *aim_dlsym_lookup(void *handle, const char *name);
void *aim_dlvsym_lookup(void *handle, const char *name);
int aim_dlopen_mask(void);
Lmid_t aim_dlmopen_namespace(Lmid_t wanted);

/* Whether a symbol is a form of a function of ours, by its version: `cuMemAlloc_v9`. */
static int is_form(const char *name)
{
    const char *mark = strstr(name, "_v");
    char base[64];
    if (mark == NULL || mark[2] < '1' || mark[2] > '9' || (size_t)(mark - name) >= sizeof base)
        return 0;
    memcpy(base, name, (size_t)(mark - name));
    base[mark - name] = 0;
    for (int i = 0; i < AIM_FUNCTIONS; i++)
        if (names_base(hooks[i].symbol, base))
            return 1;
    return 0;
}
static int refuse(void) { return 801; } /* not supported, in CUDA as in HIP */

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
    return is_form(name) && aim_enabled() && next(handle, name) != NULL && newer_form(name) ? (void *)refuse : NULL;
}

/* The same for dlvsym: HIP's functions carry versions (hip_4.2). */
__attribute__((visibility("hidden"), used)) AIM_UNCHECKED void *aim_dlvsym_lookup(void *handle, const char *name)
{
    real_dlvsym();
    return aim_dlsym_lookup(handle, name);
}

/* A library that is loaded with RTLD_DEEPBIND would bind to the driver directly. */
__attribute__((visibility("hidden"), used)) AIM_UNCHECKED int aim_dlopen_mask(void)
{
    real_dlopen();
    return aim_enabled() || aim_is_waiting() ? ~RTLD_DEEPBIND : ~0;
}

/* A namespace of its own would have a driver of its own, that nothing limits: it is loaded into the program's namespace. */
__attribute__((visibility("hidden"), used)) AIM_UNCHECKED Lmid_t aim_dlmopen_namespace(Lmid_t wanted)
{
    static int said;
    real_dlmopen();
    if (wanted == LM_ID_BASE || (!aim_enabled() && !aim_is_waiting()))
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
        ".globl dlvsym\n.type dlvsym,@function\ndlvsym:\n"
        "endbr64\n"
        "push %rdi\npush %rsi\npush %rdx\n"
        "call aim_dlvsym_lookup\n"
        "pop %rdx\npop %rsi\npop %rdi\n"
        "test %rax, %rax\njnz 1f\n"
        "jmp *aim_real_dlvsym(%rip)\n"
        "1: ret\n.size dlvsym, . - dlvsym\n"
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
        ".globl dlvsym\n.type dlvsym,%function\ndlvsym:\n"
        "hint #34\n"
        "stp x29, x30, [sp, #-48]!\nstp x0, x1, [sp, #16]\nstr x2, [sp, #32]\n"
        "bl aim_dlvsym_lookup\n"
        "mov x16, x0\n"
        "ldp x0, x1, [sp, #16]\nldr x2, [sp, #32]\nldp x29, x30, [sp], #48\n"
        "cbnz x16, 1f\n"
        "adrp x16, aim_real_dlvsym\nldr x16, [x16, #:lo12:aim_real_dlvsym]\nbr x16\n"
        "1: mov x0, x16\nret\n.size dlvsym, . - dlvsym\n"
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
