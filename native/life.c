/* Which processes are alive. A process holds a lock on a byte of the region for as long as it lives, which can be tested from any
 * pid namespace and by any user. The mapping of the region keeps the lock where the program closes the descriptor, and loses it
 * where the process becomes another program. Where a process could not take its lock, /proc of the observer's own pid namespace
 * is consulted. */
#include "aim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Who this process is. The page is empty in a child, however it was made, so that the number need not be asked for each time. */
static struct identity {
    uint32_t pid;
    uint64_t ticks, namespace;
} elsewhere, *own = &elsewhere;
static int wiped; /* the system empties the page */

enum { GONE = 0, UNKNOWN = 1 };

static const char *skip_fields(const char *at, int count)
{
    for (int i = 0; at != NULL && i < count; i++)
        at = strchr(at + 1, ' ');
    return at;
}

static uint64_t number_at(const char *at)
{
    uint64_t value = 0;
    for (at++; *at >= '0' && *at <= '9'; at++)
        value = value * 10 + (uint64_t)(*at - '0');
    return value;
}

/* Start time of a process in ticks since boot, GONE or UNKNOWN. Read from its first thread's file, which has the same value:
 * qemu-user provides a /proc/PID/stat of its own for the reading process only. */
static uint64_t start_ticks(unsigned pid)
{
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%u/task/%u/stat", pid, pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return errno == ENOENT || errno == ESRCH ? GONE : UNKNOWN;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0)
        return GONE;
    text[length] = 0;
    const char *name_end = strrchr(text, ')'); /* the name may contain anything */
    const char *threads = skip_fields(name_end, 18), *started = skip_fields(name_end, 20);
    if (name_end == NULL || threads == NULL || started == NULL)
        return GONE;
    int is_zombie = name_end[1] == ' ' && (name_end[2] == 'Z' || name_end[2] == 'X');
    if (is_zombie && number_at(threads) <= 1)
        return GONE; /* with more threads, only its main thread has ended */
    return number_at(started);
}

static void refresh(void)
{
    uint32_t known = load_acquire(&own->pid);
    if (known != 0 && wiped)
        return;
    uint32_t pid = (uint32_t)getpid();
    if (known == pid)
        return;
    struct stat status;
    if (syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/ns/pid", &status, 0) == 0)
        store(&own->namespace, (uint64_t)status.st_ino);
    store(&own->ticks, start_ticks(pid));
    store_release(&own->pid, pid);
}

void aim_life_start(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *at = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at != MAP_FAILED) {
        own = at;
        /* qemu-user up to 7.2 accepts every advice and follows none. */
        wiped = madvise(at, page, -1) != 0 && madvise(at, page, MADV_WIPEONFORK) == 0;
    }
    refresh();
}

/* Where the system does not empty the page (emulators). */
void aim_life_after_fork(void) { store(&own->pid, 0); }

uint32_t aim_own_pid(void)
{
    refresh(); /* a child made by a bare clone runs no handlers */
    return load(&own->pid);
}

int aim_is_own_process(const struct aim_process *process)
{
    refresh();
    return load(&process->pid) == load(&own->pid) && load(&process->start_ticks) == load(&own->ticks) &&
           load(&process->pid_namespace) == load(&own->namespace);
}

void aim_life_describe(struct aim_process *process)
{
    refresh();
    store(&process->pid, load(&own->pid));
    store(&process->start_ticks, load(&own->ticks));
    store(&process->pid_namespace, load(&own->namespace));
}

static struct flock life_byte(const struct aim_share *share, const struct aim_process *process, short type)
{
    uint64_t slot = (uint64_t)(process - share->tenant->processes);
    return (struct flock){
        .l_type = type,
        .l_whence = SEEK_SET,
        .l_start = (off_t)(AIM_LIFE + share->index * AIM_PROCESSES + slot),
        .l_len = 1,
    };
}

/* The lock of the place that this process has, or had. */
void aim_life_drop(struct aim_share *share)
{
    struct flock range = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = AIM_LIFE, .l_len = AIM_SENDER_LIFE - AIM_LIFE};
    fcntl(share->descriptor, F_OFD_SETLK, &range);
    share->life = 0;
}

/* 0: another process has this place. Where the system has no such locks, it is taken without. */
int aim_life_take(struct aim_share *share, const struct aim_process *process)
{
    struct flock range = life_byte(share, process, F_WRLCK);
    aim_life_drop(share);
    share->life = fcntl(share->descriptor, F_OFD_SETLK, &range) == 0;
    return share->life || (errno != EAGAIN && errno != EACCES);
}

void aim_life_hold(struct aim_share *share, struct aim_process *process)
{
    aim_life_take(share, process);
    store(&process->life_locked, (uint64_t)share->life);
}

/* The lock of another's place, taken and given back by who frees it; 0: somebody has it. */
int aim_life_seize(const struct aim_share *share, const struct aim_process *process, int take)
{
    struct flock range = life_byte(share, process, take ? F_WRLCK : F_UNLCK);
    return fcntl(share->descriptor, F_OFD_SETLK, &range) == 0;
}

int aim_life_is_held(const struct aim_share *share, const struct aim_process *process)
{
    struct flock range = life_byte(share, process, F_WRLCK);
    return fcntl(share->descriptor, F_OFD_GETLK, &range) != 0 || range.l_type != F_UNLCK; /* cannot test: alive */
}

int aim_is_alive(const struct aim_share *share, const struct aim_process *process)
{
    refresh();
    if (aim_life_is_held(share, process))
        return 1;
    if (load(&process->life_locked) || load(&process->pid_namespace) != load(&own->namespace))
        return 0; /* it ended, or became another program */
    uint64_t ticks = start_ticks(load(&process->pid));
    return ticks == UNKNOWN || ticks == load(&process->start_ticks);
}
