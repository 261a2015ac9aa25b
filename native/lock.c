/* The lock of a tenant, among the threads of this process and among processes. It keeps two processes from refusing each other at
 * once, and protects the places of dead ones while they are freed. Caps hold without it, so a holder that does not run (SIGSTOP,
 * docker pause, a debugger) is waited for once and then not again for a while. */
#include "aim.h"
#include "steps.h"

#include <errno.h>
#include <fcntl.h>
#include <time.h>

#ifdef AIM_STEPS
enum { LOCK_NS = 3000000, LOCK_FREE_NS = 3000000 };
#else
enum { LOCK_NS = 500000000, LOCK_FREE_NS = 1000000000 };
#endif

static int lock_byte(const struct aim_share *share, short type)
{
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)share->index, .l_len = 1};
    int code;
    while ((code = fcntl(share->descriptor, F_OFD_SETLK, &range)) != 0 && errno == EINTR)
        ;
    return code == 0;
}

/* 1: locked; 0: given up; -1: to be tried again. */
static int try_lock(struct aim_share *share, uint64_t until)
{
    aim_step_begins();
    int locked = lock_byte(share, F_WRLCK);
    int is_last = !locked && ((errno != EAGAIN && errno != EACCES) || aim_now() >= until);
    aim_step_ends(locked || is_last ? S_LOCK : S_NO_STEP, 0, (uint64_t)locked);
    return locked || is_last ? locked : -1;
}

static int take(struct aim_share *share)
{
    uint64_t now = aim_now(), until = now + (share->lock_free_until_ns > now ? 0 : LOCK_NS);
    int locked;
    for (long pause = 20000; (locked = try_lock(share, until)) < 0; pause = pause < 1000000 ? pause * 2 : pause) {
        struct timespec rest = {.tv_nsec = pause};
        nanosleep(&rest, NULL);
    }
    if (!locked) {
        static int said;
        aim_say_once(&said, "%s: the holder of tenant %u's lock does not run; allocations go on without the lock",
                     share->path, share->index);
        share->lock_free_until_ns = aim_now() + LOCK_FREE_NS;
        return 0;
    }
    share->lock_free_until_ns = 0;
    return 1;
}

static void let_go(struct aim_share *share)
{
    int cancel = share->cancel;
    pthread_mutex_unlock(&share->mutex);
    pthread_setcancelstate(cancel, NULL);
}

enum aim_lock aim_lock_threads(struct aim_share *share)
{
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* a cancelled thread would keep the mutex */
    pthread_mutex_lock(&share->mutex);
    share->cancel = cancel;
    if (!aim_reopen(share)) {
        let_go(share);
        return AIM_NO_FILE;
    }
    struct aim_process *slot = load_acquire(&share->slot);
    if (slot != NULL && !share->life)
        aim_life_hold(share, slot); /* the descriptor was closed by the program, and the lock with it */
    return AIM_ALONE;
}

void aim_lock_tenant(struct aim_share *share, enum aim_lock *how)
{
    if (*how == AIM_ALONE && take(share))
        *how = AIM_LOCKED;
}

void aim_unlock(struct aim_share *share, enum aim_lock how)
{
    if (how == AIM_LOCKED)
        STEP(S_UNLOCK, 0, lock_byte(share, F_UNLCK));
    let_go(share);
}
