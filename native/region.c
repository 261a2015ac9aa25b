/* Opens the regions, gives this process a slot, and keeps the caps. */
#include "aim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
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
static int enabled;
static uint64_t own_ticks;
static uint64_t own_namespace;

uint64_t aim_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void say(const char *format, va_list arguments)
{
    char text[512];
    int used = snprintf(text, sizeof text, "aimgpu: ");
    int more = vsnprintf(text + used, sizeof text - (size_t)used - 1, format, arguments);
    size_t length = (size_t)used + (size_t)(more < 0 ? 0 : more);
    if (length > sizeof text - 2)
        length = sizeof text - 2;
    text[length++] = '\n';
    ssize_t ignored = write(2, text, length);
    (void)ignored;
}

void aim_say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
}

void aim_say_once(int *said, const char *format, ...)
{
    if (__atomic_exchange_n(said, 1, __ATOMIC_RELAXED))
        return;
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
}

/* Start time of a process in ticks since boot; 0: there is no such process. Read of its first thread, which is the same:
 * qemu-user makes up a /proc/PID/stat of its own for the asking process, and others would see another time there. */
static uint64_t start_ticks(unsigned pid)
{
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%u/task/%u/stat", pid, pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return errno == ENOENT || errno == ESRCH ? 0 : 1; /* cannot look: believe that it lives */
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0)
        return 0;
    text[length] = 0;
    const char *at = strrchr(text, ')'); /* the name may hold anything */
    if (at == NULL || (at[1] == ' ' && (at[2] == 'Z' || at[2] == 'X')))
        return 0; /* a zombie holds no memory */
    for (int field = 2; at != NULL && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at == NULL)
        return 0;
    uint64_t ticks = 0;
    for (at++; *at >= '0' && *at <= '9'; at++)
        ticks = ticks * 10 + (uint64_t)(*at - '0');
    return ticks;
}

static int same_file(const struct aim_share *share)
{
    struct stat status;
    return share->descriptor >= 0 && syscall(SYS_fstat, share->descriptor, &status) == 0 &&
           status.st_dev == share->device_number && status.st_ino == share->inode;
}

/* The descriptor is ours alone: reopened after a fork, and when the program closed it behind our back. */
static int open_own(struct aim_share *share)
{
    int low = open(share->path, O_RDWR | O_CLOEXEC);
    if (low < 0)
        return 0;
    int high = fcntl(low, F_DUPFD_CLOEXEC, 512); /* out of the way of programs that count on low numbers */
    if (high < 0)
        high = low;
    else
        close(low);
    share->descriptor = high;
    return 1;
}

static void let_go(struct aim_share *share)
{
    int cancel = share->cancel;
    pthread_mutex_unlock(&share->mutex);
    pthread_setcancelstate(cancel, NULL);
}

/* One lock a tenant, kept by the kernel: it goes when its holder dies, and it holds across containers. */
static int lock(struct aim_share *share)
{
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* a cancelled thread would keep the mutex */
    pthread_mutex_lock(&share->mutex);
    share->cancel = cancel;
    int pid = (int)getpid();
    if (pid != share->locked_pid || !same_file(share)) {
        if (pid != share->locked_pid && same_file(share))
            close(share->descriptor); /* inherited by a fork that ran no handlers: it shares its parent's locks */
        if (!open_own(share) || !same_file(share)) {
            let_go(share);
            return 0;
        }
        if (pid != share->locked_pid) {
            own_ticks = start_ticks((unsigned)pid);
            share->slot = NULL;
            store(&share->held, 0);
            share->locked_pid = pid;
        }
    }
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)share->index, .l_len = 1};
    while (fcntl(share->descriptor, F_OFD_SETLKW, &range) != 0)
        if (errno != EINTR) {
            let_go(share);
            return 0;
        }
    return 1;
}

static void unlock(struct aim_share *share)
{
    struct flock range = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = (off_t)share->index, .l_len = 1};
    fcntl(share->descriptor, F_OFD_SETLK, &range);
    let_go(share);
}

static int owns(const struct aim_share *share)
{
    const struct aim_tenant *tenant = share->tenant;
    return load(&tenant->state) == AIM_ACTIVE && load(&tenant->epoch) == share->epoch;
}

static uint64_t plus(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }

static uint64_t total(const struct aim_tenant *tenant)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        const struct aim_process *process = &tenant->processes[i];
        if (load(&process->state) != AIM_ACTIVE)
            continue;
        sum = plus(sum, plus(load(&process->used_bytes), load(&process->context_bytes)));
    }
    return sum;
}

/* Gives back what dead processes held. Only processes of our own pid namespace can be judged from here. */
static void reap(struct aim_tenant *tenant)
{
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        struct aim_process *process = &tenant->processes[i];
        if (load(&process->state) != AIM_ACTIVE || load(&process->pid_namespace) != own_namespace)
            continue;
        uint64_t ticks = start_ticks(load(&process->pid));
        if (ticks != 1 && ticks != load(&process->start_ticks))
            store_release(&process->state, AIM_FREE);
    }
}

static struct aim_process *free_slot(struct aim_tenant *tenant)
{
    for (uint32_t i = 0; i < AIM_PROCESSES; i++)
        if (load(&tenant->processes[i].state) != AIM_ACTIVE) {
            if (i >= aim_processes(tenant))
                store(&tenant->process_high, i + 1);
            return &tenant->processes[i];
        }
    return NULL;
}

static int is_mine(const struct aim_process *slot)
{
    return load(&slot->state) == AIM_ACTIVE && load(&slot->pid) == (uint32_t)getpid() &&
           load(&slot->start_ticks) == own_ticks;
}

/* A program that this process was before it called exec had a slot; what it held is gone. */
static void forget_former_self(struct aim_tenant *tenant)
{
    for (uint32_t i = 0; i < aim_processes(tenant); i++) {
        struct aim_process *process = &tenant->processes[i];
        if (load(&process->pid_namespace) == own_namespace && is_mine(process))
            store_release(&process->state, AIM_FREE);
    }
}

/* With the tenant's lock held. */
static struct aim_process *attach_locked(struct aim_share *share)
{
    struct aim_tenant *tenant = share->tenant;
    forget_former_self(tenant);
    struct aim_process *slot = free_slot(tenant);
    if (slot == NULL) {
        reap(tenant);
        slot = free_slot(tenant);
    }
    if (slot == NULL)
        return NULL;
    memset(slot, 0, sizeof *slot);
    store(&slot->pid, (uint32_t)getpid());
    store(&slot->start_ticks, own_ticks);
    store(&slot->pid_namespace, own_namespace);
    store(&slot->context_bytes, load(&tenant->context_bytes));
    store(&slot->attached_ns, aim_now());
    store_release(&slot->state, AIM_ACTIVE);
    return slot;
}

struct aim_process *aim_attach(struct aim_share *share)
{
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot != NULL)
        return slot;
    if (share->tenant == NULL || !lock(share))
        return NULL;
    slot = share->slot;
    if (slot == NULL && owns(share))
        slot = attach_locked(share);
    store_release(&share->slot, slot);
    unlock(share);
    return slot;
}

/* 1: the answer is `*allowed`; 0: the books decide. */
static int decided(struct aim_share *share, int *allowed)
{
    static int said;
    if (share == NULL) {
        *allowed = 1;
        return 1;
    }
    if (!share->broken && owns(share))
        return 0;
    aim_say_once(&said, "%s %s: device allocations are %s", share->path == NULL ? "a device" : share->path,
                 share->path == NULL ? "was not granted" : share->broken ? share->wrong : "no longer grants anything to us",
                 aim_fail_closed ? "refused (fail closed)" : "NOT limited (fail open)");
    *allowed = !aim_fail_closed;
    return 1;
}

int aim_reserve(int device, uint64_t bytes)
{
    static int said;
    struct aim_share *share = aim_share_of(device);
    int allowed = 0;
    if (decided(share, &allowed))
        return allowed;
    struct aim_tenant *tenant = share->tenant;
    if (!lock(share)) {
        aim_say_once(&said, "%s cannot be locked: allocations are %s", share->path,
                     aim_fail_closed ? "refused (fail closed)" : "NOT limited (fail open)");
        return !aim_fail_closed;
    }
    if (share->slot == NULL || !is_mine(share->slot)) {
        struct aim_process *slot = attach_locked(share);
        if (slot != NULL)
            store(&slot->used_bytes, load(&share->held));
        store_release(&share->slot, slot);
    }
    uint64_t cap = load(&tenant->cap_bytes), sum = total(tenant);
    if (share->slot != NULL && plus(sum, bytes) > cap) {
        reap(tenant);
        sum = total(tenant);
    }
    if (share->slot != NULL && plus(sum, bytes) <= cap) {
        add(&share->slot->used_bytes, bytes);
        add(&share->held, bytes);
        sum += bytes;
        allowed = 1;
    } else {
        add(&tenant->denied, 1);
    }
    store(&tenant->used_bytes, sum);
    if (sum > load(&tenant->peak_bytes))
        store(&tenant->peak_bytes, sum);
    unlock(share);
    return allowed;
}

/* A process is charged for its context before it has one. A second context of the same process is not charged again: the
 * controller does that when the driver measures it. */
int aim_admit_context(int device)
{
    struct aim_share *share = aim_share_of(device);
    int allowed = 0;
    if (decided(share, &allowed))
        return allowed;
    if (!lock(share))
        return !aim_fail_closed;
    struct aim_tenant *tenant = share->tenant;
    allowed = share->slot != NULL && is_mine(share->slot);
    if (!allowed) {
        uint64_t context = load(&tenant->context_bytes), cap = load(&tenant->cap_bytes);
        if (plus(total(tenant), context) > cap)
            reap(tenant);
        struct aim_process *slot = NULL;
        if (context == 0 || plus(total(tenant), context) <= cap)
            slot = attach_locked(share);
        store_release(&share->slot, slot);
        allowed = slot != NULL; /* without one, its context would be charged to nobody */
        if (!allowed)
            add(&tenant->denied, 1);
    }
    unlock(share);
    return allowed;
}

static void take_away(uint64_t *counter, uint64_t bytes)
{
    uint64_t old = load(counter);
    while (!__atomic_compare_exchange_n(counter, &old, old > bytes ? old - bytes : 0, 1, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
        ;
}

void aim_give_back(int device, uint64_t bytes)
{
    struct aim_share *share = aim_share_of(device);
    if (share == NULL || share->broken || bytes == 0)
        return;
    take_away(&share->held, bytes);
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot == NULL || !is_mine(slot))
        return;
    take_away(&slot->used_bytes, bytes);
    store(&share->tenant->used_bytes, total(share->tenant));
}

int aim_cap(int device, uint64_t *cap, uint64_t *used)
{
    struct aim_share *share = aim_share_of(device);
    if (share == NULL || share->broken || !owns(share))
        return 0;
    *cap = load(&share->tenant->cap_bytes);
    *used = total(share->tenant);
    return 1;
}

int aim_enabled(void) { return enabled; }
int aim_only_device(void) { return share_count == 1 ? 0 : -1; }

struct aim_share *aim_share_of(int device)
{
    static struct aim_share nowhere = {.broken = 1, .descriptor = -1};
    if (!enabled)
        return NULL;
    if (device >= 0 && device < share_count)
        return &shares[device];
    return &nowhere; /* a device that was not granted */
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

static const char *map(struct aim_share *share, const char *tenant)
{
    struct stat status;
    if (!open_own(share))
        return strerror(errno);
    if (syscall(SYS_fstat, share->descriptor, &status) != 0)
        return strerror(errno);
    share->device_number = status.st_dev;
    share->inode = status.st_ino;
    share->locked_pid = (int)getpid();
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
    for (uint32_t i = 0; i < AIM_TENANTS; i++)
        if (load(&share->region->tenants[i].state) == AIM_ACTIVE &&
            strncmp(share->region->tenants[i].name, tenant, AIM_NAME) == 0) {
            share->index = i;
            share->tenant = &share->region->tenants[i];
            share->epoch = load(&share->tenant->epoch);
            return NULL;
        }
    return "knows no such tenant";
}

static void open_share(struct aim_share *share, char *path, const char *tenant)
{
    pthread_mutex_init(&share->mutex, NULL);
    share->descriptor = -1;
    share->path = path;
    const char *wrong = map(share, tenant);
    if (wrong == NULL)
        return;
    share->broken = 1;
    share->wrong = wrong;
}

static void after_fork(void)
{
    own_ticks = start_ticks((unsigned)getpid());
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
    }
    aim_memory_after_fork();
    aim_gate_after_fork();
}

/* AIMGPU_REGION: paths, one a visible device, separated by ':'. AIMGPU_TENANT: the name in them. */
__attribute__((constructor)) static void start(void)
{
    const char *regions = getenv("AIMGPU_REGION"), *tenant = getenv("AIMGPU_TENANT"), *fail = getenv("AIMGPU_FAIL");
    if (regions == NULL || *regions == 0)
        return;
    aim_fail_closed = fail == NULL || strcmp(fail, "open") != 0;
    own_ticks = start_ticks((unsigned)getpid());
    struct stat status;
    if (syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/ns/pid", &status, 0) == 0)
        own_namespace = status.st_ino;
    char *rest = strdup(regions);
    for (char *path = rest; path != NULL && share_count < AIM_DEVICES; share_count++) {
        char *colon = strchr(path, ':');
        if (colon != NULL)
            *colon++ = 0;
        open_share(&shares[share_count], path, tenant == NULL ? "" : tenant);
        path = colon;
    }
    pthread_atfork(NULL, NULL, after_fork);
    enabled = 1;
}
