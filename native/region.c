/* Opens the regions that AIMGPU_REGION names, and keeps them usable over forks, exec and closed descriptors. */
#include "aim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int aim_fail_closed = 1;
__thread int aim_depth;

static struct aim_share shares[AIM_DEVICES];
static int share_count;
enum { NOT_STARTED, OFF, WAITING, ON };
static int state, used_too_early;

uint64_t aim_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int same_file(const struct aim_share *share)
{
    struct stat status;
    return share->descriptor >= 0 && syscall(SYS_fstat, share->descriptor, &status) == 0 &&
           status.st_dev == share->device_number && status.st_ino == share->inode;
}

static int open_own(struct aim_share *share)
{
    int low = open(share->path, O_RDWR | O_CLOEXEC);
    if (low < 0)
        return 0;
    int high = fcntl(low, F_DUPFD_CLOEXEC, 512); /* out of the way of programs that expect low numbers */
    if (high < 0)
        high = low;
    else
        close(low);
    share->descriptor = high;
    share->life = 0;
    return 1;
}

/* The mapping keeps its file open, and the locks that were taken through it. */
static int map_again(const struct aim_share *share)
{
    return same_file(share) && mmap(share->region, sizeof *share->region, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                                    share->descriptor, 0) != MAP_FAILED;
}

/* The descriptor is this process's own: opened again after a fork, and when the program closed it. */
int aim_reopen(struct aim_share *share)
{
    int pid = (int)aim_own_pid(), ours = pid == share->locked_pid;
    struct aim_process *slot = load_acquire(&share->slot);
    if (ours && same_file(share))
        return 1;
    if (!ours && same_file(share))
        close(share->descriptor); /* inherited by a fork that ran no handlers: it shares its parent's locks */
    if (ours && slot != NULL)
        store(&slot->life_locked, 0); /* until it is taken through the new descriptor */
    if (!open_own(share) || !map_again(share))
        return 0;
    if (!ours) {
        store_release(&share->slot, NULL);
        store(&share->held, 0);
        share->locked_pid = pid;
    }
    return 1;
}

int aim_share_count(void) { return share_count; }
struct aim_share *aim_share_at(int index) { return index >= 0 && index < share_count ? &shares[index] : NULL; }

struct aim_share *aim_share_of(int device)
{
    static struct aim_share nowhere = {.broken = 1, .descriptor = -1};
    if (!aim_enabled())
        return NULL;
    int index = aim_device_index(device);
    return index >= 0 ? &shares[index] : &nowhere; /* a device that was not granted */
}

static uint64_t boot_hash(void)
{
    char text[64];
    int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, text, sizeof text);
    if (file >= 0)
        close(file);
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (ssize_t i = 0; i < length && text[i] != '\n'; i++)
        hash = (hash ^ (unsigned char)text[i]) * 1099511628211u;
    return hash;
}

static const char *defect(const struct aim_region *region, uint64_t size)
{
    const struct aim_header *header = &region->header;
    if (size < sizeof *region)
        return "is too short";
    if (header->magic != AIM_MAGIC)
        return "is not a region";
    if (header->version != AIM_VERSION)
        return "has another version";
    if (header->header_bytes != sizeof *header || header->region_bytes != sizeof *region ||
        header->tenants != AIM_TENANTS || header->processes != AIM_PROCESSES ||
        header->tenant_bytes != sizeof(struct aim_tenant) || header->process_bytes != sizeof(struct aim_process))
        return "has another layout";
    if (header->boot != boot_hash())
        return "is from another boot";
    return NULL;
}

static const char *find_tenant(struct aim_share *share, const char *name)
{
    for (uint32_t i = 0; i < AIM_TENANTS; i++) {
        struct aim_tenant *tenant = &share->region->tenants[i];
        if (load(&tenant->state) == AIM_ACTIVE && strncmp(tenant->name, name, AIM_NAME) == 0) {
            share->index = i;
            share->tenant = tenant;
            share->epoch = load(&tenant->epoch);
            return NULL;
        }
    }
    return "knows no such tenant";
}

static const char *open_region(struct aim_share *share, const char *tenant)
{
    struct stat status;
    if (!open_own(share) || syscall(SYS_fstat, share->descriptor, &status) != 0)
        return strerror(errno);
    share->device_number = status.st_dev;
    share->inode = status.st_ino;
    share->locked_pid = (int)aim_own_pid();
    if ((uint64_t)status.st_size < sizeof *share->region)
        return "is too short";
    void *at = mmap(NULL, sizeof *share->region, PROT_READ | PROT_WRITE, MAP_SHARED, share->descriptor, 0);
    if (at == MAP_FAILED)
        return strerror(errno);
    const char *wrong = defect(at, (uint64_t)status.st_size);
    if (wrong != NULL) {
        munmap(at, sizeof *share->region);
        return wrong;
    }
    share->region = at;
    return find_tenant(share, tenant);
}

static void open_share(struct aim_share *share, char *path, const char *tenant)
{
    pthread_mutex_init(&share->mutex, NULL);
    share->descriptor = -1;
    share->path = path;
    share->wrong = open_region(share, tenant);
    share->broken = share->wrong != NULL;
    if (!share->broken)
        aim_forget_former_self(share);
}

/* The inherited mapping refers to the parent's open file and would keep its lock for life beyond its death. */
static void map_own(struct aim_share *share)
{
    int descriptor = share->descriptor, life = share->life;
    if (open_own(share)) {
        map_again(share);
        close(share->descriptor);
    }
    share->descriptor = descriptor;
    share->life = life;
}

static void after_fork(void)
{
    aim_life_after_fork();
    for (int i = 0; i < share_count; i++) {
        struct aim_share *share = &shares[i];
        pthread_mutex_init(&share->mutex, NULL);
        share->slot = NULL;
        share->held = 0;
        if (share->broken)
            continue;
        if (same_file(share))
            close(share->descriptor);
        share->descriptor = -1; /* opened again when it is first needed */
        map_own(share);
    }
    aim_devices_after_fork();
    aim_memory_after_fork();
    aim_gate_after_fork();
}

/* The variables that a process began with, each with its 0; NULL: they cannot be read. */
static char *first_environment(const char *path)
{
    size_t room = 0, length = 0;
    ssize_t count = -1;
    char *text = NULL;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    do {
        room += 1 << 16;
        char *larger = file < 0 ? NULL : realloc(text, room + 1);
        if (larger == NULL)
            break;
        text = larger;
        while (length < room && (count = read(file, text + length, room - length)) > 0)
            length += (size_t)count;
    } while (count > 0);
    if (file >= 0)
        close(file);
    if (text != NULL)
        memset(text + length, 0, room + 1 - length);
    return text;
}

/* Without `block` in this process's environment as it is now. */
static const char *variable(const char *block, const char *name)
{
    size_t length = strlen(name);
    if (block == NULL)
        return getenv(name);
    for (; *block != 0; block += strlen(block) + 1)
        if (strncmp(block, name, length) == 0 && block[length] == '=')
            return block + length + 1;
    return NULL;
}

/* AIMGPU_REGION: paths, one per granted device, separated by ':', or "later". AIMGPU_TENANT: the name of the tenant in them.
 * Before the C library is initialised, and after a constructor has emptied the environment, they are those that the process began
 * with. A child with an empty environment that /etc/ld.so.preload holds gets those of the container's first process. */
static int open_regions(void)
{
    static const char *const places[] = {"/proc/self/environ", "/proc/1/environ"};
    char *block = NULL;
    const char *regions = getenv("AIMGPU_REGION");
    for (unsigned i = 0; regions == NULL && i < sizeof places / sizeof *places; i++) {
        free(block);
        block = first_environment(places[i]);
        regions = block == NULL ? NULL : variable(block, "AIMGPU_REGION");
    }
    const char *tenant = variable(block, "AIMGPU_TENANT"), *fail = variable(block, "AIMGPU_FAIL");
    if (regions == NULL || *regions == 0)
        return OFF;
    if (strcmp(regions, "later") == 0)
        return WAITING;
    aim_fail_closed = fail == NULL || strcmp(fail, "open") != 0;
    aim_life_start();
    char *rest = strdup(regions);
    for (char *path = rest; path != NULL && share_count < AIM_DEVICES; share_count++) {
        char *colon = strchr(path, ':');
        if (colon != NULL)
            *colon++ = 0;
        open_share(&shares[share_count], path, tenant == NULL ? "" : tenant);
        path = colon;
    }
    pthread_atfork(NULL, NULL, after_fork);
    return ON;
}

/* Libraries that the program is linked to are initialised before this one, and may allocate: the first call starts it. */
static int start(void)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static __thread int starting; /* a replaced malloc may look a name up meanwhile */
    if (starting)
        return 0;
    starting = 1;
    pthread_mutex_lock(&mutex);
    if (load(&state) == NOT_STARTED)
        store_release(&state, open_regions());
    pthread_mutex_unlock(&mutex);
    starting = 0;
    return load(&state) == ON;
}

int aim_enabled(void)
{
    int now = load_acquire(&state);
    return now == NOT_STARTED ? start() : now == ON;
}

/* A prepared process belongs to no tenant yet: it may load the driver, and may not use it. */
int aim_is_waiting(void) { return load_acquire(&state) == WAITING; }

int aim_too_early(int code)
{
    store(&used_too_early, 1);
    return code;
}

/* Called by a child of a prepared process, which has its tenant's environment by then. 0: limits hold from here on. */
AIM_EXPORT int aimgpu_attach(void);
AIM_EXPORT int aimgpu_attach(void)
{
    if (!aim_is_waiting() || load(&used_too_early) || open_regions() != ON)
        return 1;
    store_release(&state, ON);
    return 0;
}

__attribute__((constructor)) static void begin(void) { aim_enabled(); }
