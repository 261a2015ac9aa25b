/* How the processes of one tenant share its caps: account.c and life.c, and reaping and resizing as the daemon does them
 * (src/aimgpu/isolation/region.py). Every access to the shared region is a step of its own; a process may die between any two.
 * docs/explanation/region-model.md says what is proved, and for which bounds. */

#define FREE 0
#define ACTIVE 1
#define CLAIMED 2

#ifndef PROCESSES
#define PROCESSES 3
#endif
#ifndef DEVICES
#define DEVICES 2
#endif
#ifndef PLACES
#define PLACES PROCESSES
#endif
#ifndef HIGH
#define HIGH 0
#endif
#ifndef LEAST_CAP
#define LEAST_CAP 1
#endif
#ifndef MOST_CAP
#define MOST_CAP 2
#endif
#ifndef CONTEXT /* units that a process is charged for its context */
#define CONTEXT 0
#endif
/* How much happens in all. */
#ifndef OPERATIONS
#define OPERATIONS 4
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef ROUNDS /* of the daemon: reap, and perhaps resize */
#define ROUNDS 1
#endif
#define AT(d, i) ((d) * PLACES + (i))
#define OF(p, d) (((p) - 1) * DEVICES + (d))
#define OWN AT(d, place[d] - 1)
#define FORMER 100 /* added to the owner of a place whose process became another program */

/* The region. */
byte state[DEVICES * PLACES], used[DEVICES * PLACES], context[DEVICES * PLACES];
byte cap[DEVICES] = MOST_CAP, high[DEVICES] = HIGH;
/* Kept by the system: who holds the tenant's lock (the daemon: DAEMON), and the locks for life. */
#define DAEMON 99
byte lock[DEVICES], life[DEVICES * PLACES];
/* Whose name is in a place; 0: nobody's, or that of a process that died. */
byte owner[DEVICES * PLACES];
/* Seen by no process. `memory`: what the driver gave to each. `limit`: the cap as agreed; while one is tried, the larger of both. */
byte memory[PROCESSES * DEVICES], limit[DEVICES] = MOST_CAP;
byte operations = OPERATIONS, deaths = DEATHS, rounds = ROUNDS;
bit mistaken; /* a recording in which a place of a live process was freed, which finds it and takes one again */
bit stale[DEVICES * PLACES]; /* taken by a process that was dead when the daemon began to reap */

/* With REPLAY, a step is taken only as the next one that was recorded of the C: its process, what it did, the place and the value
 * (native/steps.h). A recording is accepted where some order of unrecorded steps fits it to its end. */
#ifdef REPLAY
c_decl {
\#include "recorded.h"
}
chan next = [0] of { byte, byte, byte, byte };
int at = 0;
#define DIES atomic { next?eval(_pid),DEATH,0,0 }
#define BECOMES_ANOTHER atomic { next?eval(_pid),EXEC,0,0 }
#define LOG(step, place_, value) if :: next?eval(_pid),step,eval(place_),eval(value) :: DIES -> goto dead fi;
#define DAEMON_LOG(step, place_, value) next?eval(_pid),step,eval(place_),eval(value);
#else
#define DIES atomic { deaths > 0 -> deaths-- }
#define BECOMES_ANOTHER DIES
#define LOG(step, place_, value)
#define DAEMON_LOG(step, place_, value)
#endif
#define S_LOCK 1
#define S_UNLOCK 2
#define S_HELD 3
#define S_SUMMED 4
#define S_CAP 5
#define S_ADD 6
#define S_TAKE_AWAY 7
#define S_FAR 8
#define S_FORMER 9
#define S_SET_FREE 10
#define S_LEFT 11
#define S_SEIZE 12
#define S_RELEASE 13
#define S_LOOK 14
#define S_LIFE 15
#define S_CLAIM 16
#define S_NO_PLACE 17
#define S_HIGH 18
#define S_WIPE 19
#define S_SET_USED 20
#define S_SET_CONTEXT 21
#define S_ACTIVATE 22
#define S_DROP 23
#define S_HOLDS 24
/* Of the test that records. */
#define DEATH 50
#define EXEC 51
#define D_LOCKED 60
#define D_FREES 61
#define D_CAP 62
#define D_KEPT 63
#define D_DONE 64
#define D_MISTAKE 65

#define STEP(effect) if :: atomic { effect } :: DIES -> goto dead fi
/* One that only looks: to die after it is to die before it. */
#define READ(effect) atomic { effect }

inline check_cap(d_) {
    atomic {
        given = 0; k = 0;
        do
        :: k < PROCESSES -> given = given + memory[OF(k + 1, d_)]; k++
        :: else -> break
        od;
        assert(given <= limit[d_] || mistaken);
        given = 0; k = 0
    }
}

/* account.c: total */
inline total() {
    atomic { sum = 0; i = 0; more = 0 }
    do
    :: atomic {
            READ(more = (i < high[d]));
            if :: !more -> i = 0; break :: else fi;
            LOG(S_SUMMED, i, (state[AT(d, i)] == ACTIVE -> used[AT(d, i)] + context[AT(d, i)] : 0))
            is_active = (state[AT(d, i)] == ACTIVE);
            if
            :: is_active ->
                sum = sum + used[AT(d, i)];
                sum = sum + context[AT(d, i)];
                is_active = 0
            :: else
            fi;
            i++
        }
    od
}

inline take_lock() {
    if
    :: !locked ->
        if
        :: atomic { lock[d] == 0 -> LOG(S_LOCK, 0, 1) lock[d] = _pid; locked = 1 }
        :: atomic { lock[d] != 0 -> LOG(S_LOCK, 0, 0) skip } /* not waited for any longer */
        :: DIES -> goto dead
        fi
    :: else
    fi
}

inline unlock() {
    if
    :: locked -> STEP(LOG(S_UNLOCK, 0, 1) lock[d] = 0; locked = 0)
    :: else
    fi
}

inline is_held(answer) {
    answer = 0;
    if
    :: place[d] != 0 ->
        READ(LOG(S_HELD, place[d] - 1, (state[OWN] == ACTIVE && owner[OWN] == _pid))
            answer = (state[OWN] == ACTIVE && owner[OWN] == _pid))
    :: else
    fi
}

inline take_away() {
    STEP(LOG(S_TAKE_AWAY, place[d] - 1, b) used[OWN] = used[OWN] - b)
}

/* The place's lock for life is taken for the moment: nobody can claim it. */
inline reap() {
    if
    :: locked ->
        i = 0;
        do
        :: i < PLACES ->
            if
            :: place[d] != i + 1 -> READ(LOG(S_LEFT, i, state[AT(d, i)]) is_active = (state[AT(d, i)] != FREE))
            :: else -> is_active = 0
            fi;
            if
            :: is_active ->
                if
                :: atomic { life[AT(d, i)] != 0 -> LOG(S_SEIZE, i, 0) is_active = 0 }
                :: atomic { life[AT(d, i)] == 0 -> LOG(S_SEIZE, i, 1) life[AT(d, i)] = _pid }
                :: DIES -> goto dead
                fi
            :: else
            fi;
            if
            :: is_active ->
                READ(LOG(S_LEFT, i, state[AT(d, i)]) is_active = (state[AT(d, i)] != FREE));
                if
                :: is_active -> STEP(LOG(S_SET_FREE, i, 0) state[AT(d, i)] = FREE)
                :: else
                fi;
                STEP(LOG(S_RELEASE, i, 1) life[AT(d, i)] = 0)
            :: else
            fi;
            i++
        :: else -> break
        od;
        atomic { i = 0; is_active = 0 }
    :: else
    fi
}

#define IS_FORMER (state[AT(d, i)] == ACTIVE && (owner[AT(d, i)] == _pid || owner[AT(d, i)] == _pid + FORMER))
inline forget_former_self() {
    atomic { i = 0; more = 0 }
    do
    :: atomic {
            READ(more = (i < high[d]));
            if :: !more -> break :: else fi;
            LOG(S_FORMER, i, IS_FORMER)
            is_active = IS_FORMER
        }
        if
        :: is_active ->
            take_lock();
            if
            :: locked ->
                READ(LOG(S_FORMER, i, IS_FORMER) is_active = IS_FORMER);
                if
                :: is_active -> STEP(LOG(S_SET_FREE, i, 0) state[AT(d, i)] = FREE)
                :: else
                fi
            :: else
            fi
        :: else
        fi;
        i++
    od;
    atomic { i = 0; more = 0; is_active = 0 }
}

inline drop_life(step) {
    STEP(LOG(step, 0, 0) forget_life(d))
}

inline forget_life(d_) {
    atomic {
        k = 0;
        do
        :: k < PLACES -> if :: life[AT(d_, k)] == _pid -> life[AT(d_, k)] = 0 :: else fi; k++
        :: else -> break
        od;
        k = 0
    }
}

/* `i`: the place; PLACES: none. The names of the dead stay in the places until they are wiped. */
inline claim_place() {
    i = 0;
    do
    :: i == PLACES -> drop_life(S_NO_PLACE); break
    :: else ->
        READ(LOG(S_LOOK, i, state[AT(d, i)]) is_active = (state[AT(d, i)] != FREE));
        if
        :: !is_active ->
            atomic {
                LOG(S_LIFE, i, (life[AT(d, i)] == 0 || life[AT(d, i)] == _pid))
                forget_life(d);
                if
                :: life[AT(d, i)] == 0 -> life[AT(d, i)] = _pid; more = 1; stale[AT(d, i)] = 0
                :: life[AT(d, i)] != 0 -> more = 0
                fi
            }
            if
            :: more ->
                if
                :: atomic { state[AT(d, i)] == FREE -> LOG(S_CLAIM, i, 1) state[AT(d, i)] = CLAIMED; owner[AT(d, i)] = _pid }
                    break
                :: atomic { state[AT(d, i)] != FREE -> LOG(S_CLAIM, i, 0) more = 0 }
                :: DIES -> goto dead
                fi
            :: else
            fi
        :: else
        fi;
        i++
    od;
    atomic { more = 0; is_active = 0 }
}

inline raise_high() {
    if
    :: i < PLACES ->
        if
        :: atomic { high[d] <= i -> LOG(S_HIGH, i, 1) high[d] = i + 1 }
        :: atomic { high[d] > i -> LOG(S_HIGH, i, 0) skip }
        :: DIES -> goto dead
        fi
    :: else
    fi
}

inline attach() {
    place[d] = 0;
    forget_former_self();
    claim_place();
    raise_high();
    if
    :: i == PLACES -> take_lock(); reap(); claim_place(); raise_high()
    :: else
    fi;
    if
    :: i < PLACES ->
        STEP(LOG(S_WIPE, i, 0) used[AT(d, i)] = 0; context[AT(d, i)] = 0);
        STEP(LOG(S_SET_USED, i, held[d]) used[AT(d, i)] = held[d]);
        STEP(LOG(S_SET_CONTEXT, i, CONTEXT) context[AT(d, i)] = CONTEXT);
        STEP(LOG(S_ACTIVATE, i, 0) state[AT(d, i)] = ACTIVE; place[d] = i + 1; i = 0)
    :: else -> i = 0
    fi
}

inline add_within_cap() {
    fits = 0;
    total();
    READ(LOG(S_CAP, 0, cap[d]) fits = (sum + b <= cap[d]));
    if
    :: fits ->
        STEP(LOG(S_ADD, place[d] - 1, b) used[OWN] = used[OWN] + b);
        total();
        READ(LOG(S_CAP, 0, cap[d]) fits = (sum <= cap[d]));
        if :: !fits -> take_away() :: else fi
    :: else
    fi;
    sum = 0
}

inline reserve_far() {
    fits = 0;
    is_held(fits);
    if
    :: fits ->
        READ(LOG(S_CAP, 0, cap[d]) seen = cap[d]);
        total();
        fits = ((sum + b) * 8 <= seen * 7);
        seen = 0; sum = 0;
        if
        :: fits ->
            STEP(LOG(S_HOLDS, 0, held[d] + b) held[d] = held[d] + b; LOG(S_ADD, place[d] - 1, b) used[OWN] = used[OWN] + b);
            total();
            atomic {
                LOG(S_FAR, place[d] - 1, (sum <= cap[d] && state[OWN] == ACTIVE))
                READ(fits = (sum <= cap[d]));
                if
                :: fits -> fits = (state[OWN] == ACTIVE)
                :: else
                fi;
                sum = 0
            }
            if
            :: !fits ->
                take_away();
                READ(LOG(S_HOLDS, 0, held[d] - b) held[d] = held[d] - b)
            :: else
            fi
        :: else
        fi
    :: else
    fi
}

inline reserve() {
    reserve_far();
    if
    :: !fits ->
        take_lock();
        is_held(fits);
        if :: !fits -> attach() :: else fi;
        fits = 0;
        if
        :: place[d] != 0 ->
            add_within_cap();
            if :: !fits -> reap(); add_within_cap() :: else fi
        :: else
        fi;
        if :: fits -> READ(LOG(S_HOLDS, 0, held[d] + b) held[d] = held[d] + b) :: else fi;
        unlock()
    :: else
    fi
}

inline give_back() {
    READ(LOG(S_HOLDS, 0, held[d] - b) held[d] = held[d] - b);
    is_held(fits);
    if
    :: fits ->
        take_away();
        skip
    :: else
    fi;
    atomic { fits = 0; sum = 0 }
}

inline leave() {
    STEP(LOG(S_SET_FREE, place[d] - 1, 0) state[OWN] = FREE; place[d] = 0);
    drop_life(S_DROP)
}

/* `within`: the cap in eighths */
inline attach_within_cap(within) {
    fits = (CONTEXT == 0);
    if
    :: !fits -> total(); fits = ((sum + CONTEXT) * 8 <= within); sum = 0
    :: else
    fi;
    if
    :: fits ->
        attach();
        fits = (place[d] != 0);
        if
        :: fits && CONTEXT != 0 ->
            total();
            READ(LOG(S_CAP, 0, cap[d]) fits = (sum <= cap[d]));
            sum = 0;
            if :: !fits -> leave() :: else fi
        :: else
        fi
    :: else -> place[d] = 0
    fi
}

inline admit() {
    atomic {
        LOG(S_CAP, 0, cap[d])
        seen = cap[d];
        is_held(fits)
    }
    if
    :: !fits ->
        forget_former_self();
        attach_within_cap(seen * 7);
        if
        :: !fits ->
            take_lock();
            total();
            if :: sum + CONTEXT > seen -> sum = 0; reap() :: else -> sum = 0 fi;
            attach_within_cap(seen * 8)
        :: else
        fi
    :: else
    fi;
    unlock();
    seen = 0
}

active proctype daemon() {
    byte d, i, former, wanted, sum, given, k;
    bit locked, refused;
end:
    do
#ifdef REPLAY
    :: atomic { next?eval(_pid),D_MISTAKE,i,0 -> state[AT(0, i)] = FREE; mistaken = 1; i = 0 }
#endif
    :: atomic {
            rounds > 0 -> rounds--;
            d = 0;
#if DEVICES > 1
            if :: d = 0 :: d = 1 fi;
#endif
            if
            :: lock[d] == 0 -> DAEMON_LOG(D_LOCKED, 0, 1) lock[d] = DAEMON; locked = 1
            :: lock[d] != 0 -> DAEMON_LOG(D_LOCKED, 0, 0) skip
            fi
        }
        if
        :: locked ->
            atomic {
                i = 0;
                do
                :: i < PLACES -> stale[AT(d, i)] = (state[AT(d, i)] != FREE && life[AT(d, i)] == 0); i++
                :: else -> break
                od;
                i = 0
            }
            do
            :: i < PLACES ->
                if
                :: atomic { state[AT(d, i)] != FREE && life[AT(d, i)] == 0 -> life[AT(d, i)] = DAEMON }
                    if :: atomic { state[AT(d, i)] != FREE -> DAEMON_LOG(D_FREES, i, 0) state[AT(d, i)] = FREE } :: else fi;
                    atomic { life[AT(d, i)] = 0; stale[AT(d, i)] = 0 }
                :: else
                fi;
                i++
            :: else -> break
            od;
            atomic {
                i = 0;
                do
                :: i < PLACES -> assert(!stale[AT(d, i)] || state[AT(d, i)] == FREE); stale[AT(d, i)] = 0; i++
                :: else -> break
                od;
                i = 0
            }
        :: else
        fi;
        if
        :: atomic {
                wanted = LEAST_CAP;
                do :: wanted < MOST_CAP -> wanted++ :: break od;
                former = cap[d];
                DAEMON_LOG(D_CAP, 0, wanted)
                cap[d] = wanted;
                if :: wanted > limit[d] -> limit[d] = wanted :: else fi
            }
            sum = 0;
            do
            :: i < PLACES ->
                atomic {
                    if :: state[AT(d, i)] == ACTIVE -> sum = sum + used[AT(d, i)] + context[AT(d, i)] :: else fi;
                    i++
                }
            :: else -> break
            od;
            i = 0;
            if
            :: atomic { sum <= wanted || wanted >= former -> DAEMON_LOG(D_KEPT, 0, 1) limit[d] = wanted; check_cap(d) }
            :: atomic { sum > wanted && wanted < former -> DAEMON_LOG(D_KEPT, 0, 0) cap[d] = former; limit[d] = former }
            fi
        :: true
        fi;
        atomic {
            DAEMON_LOG(D_DONE, 0, 0)
            if :: locked -> lock[d] = 0; locked = 0 :: else fi;
            former = 0; wanted = 0; sum = 0
        }
    od
}

active [PROCESSES] proctype process() {
    byte place[DEVICES], held[DEVICES];
    byte d, b, i, k, sum, seen, given;
    bit locked, more, is_active, fits;

begin:
    atomic {
        d = 0; fits = 0; b = 0;
        do
        :: d < DEVICES ->
            assert(lock[d] != _pid);
            k = 0;
            do
            :: k < PLACES -> assert((life[AT(d, k)] == _pid) == (place[d] == k + 1)); k++
            :: else -> break
            od;
            k = 0;
            assert(mistaken || place[d] == 0 || (state[OWN] == ACTIVE && owner[OWN] == _pid && used[OWN] == held[d]));
            d++
        :: else -> break
        od;
        d = 0
    }
end_choice:
    if
    :: atomic {
            operations > 0 -> operations--;
#if DEVICES > 1
            if :: d = 0 :: d = 1 fi;
#endif
            b = 1;
            if :: CONTEXT == 0 || place[d] != 0 :: else -> operations++; goto begin fi
        }
        reserve();
        if
        :: fits ->
            if
            :: atomic { memory[OF(_pid, d)] = memory[OF(_pid, d)] + b; check_cap(d) }
            :: give_back() /* the driver refused */
            :: DIES -> goto dead
            fi
        :: else
        fi
    :: atomic {
            operations > 0 -> operations--;
#if DEVICES > 1
            if :: d = 0 :: d = 1 fi;
#endif
            b = 1;
            if :: held[d] >= 1 :: else -> operations++; goto begin fi;
            memory[OF(_pid, d)] = memory[OF(_pid, d)] - b
        }
        give_back()
#if CONTEXT > 0
    :: atomic {
            operations > 0 -> operations--;
#if DEVICES > 1
            if :: d = 0 :: d = 1 fi;
#endif
            if :: place[d] == 0 :: else -> operations++; goto begin fi
        }
        admit();
        if
        :: fits -> atomic { memory[OF(_pid, d)] = memory[OF(_pid, d)] + CONTEXT; check_cap(d) }
        :: else
        fi
#endif
    :: BECOMES_ANOTHER -> goto other
    :: DIES -> goto dead
#ifdef REPLAY /* a program begins */
    :: forget_former_self(); unlock()
#endif
    fi;
    goto begin;

    /* The system takes back what it held: memory, then locks. */
other:
    atomic {
        k = 0;
        do
        :: k < DEVICES * PLACES -> if :: owner[k] == _pid -> owner[k] = _pid + FORMER :: else fi; k++
        :: else -> break
        od;
        goto gone
    }
dead:
    atomic {
        k = 0;
        do
        :: k < DEVICES * PLACES -> if :: owner[k] == _pid || owner[k] == _pid + FORMER -> owner[k] = 0 :: else fi; k++
        :: else -> break
        od
    }
gone:
    atomic {
        d = 0;
        do
        :: d < DEVICES ->
            memory[OF(_pid, d)] = 0;
            forget_life(d);
            if :: lock[d] == _pid -> lock[d] = 0 :: else fi;
            place[d] = 0;
            held[d] = 0;
            d++
        :: else -> break
        od;
        d = 0; b = 0; i = 0; k = 0; sum = 0; seen = 0; locked = 0; more = 0; is_active = 0; fits = 0;
        goto begin
    }
}

#ifdef REPLAY
active proctype recorded() {
end:
    do
    :: atomic { c_expr { now.at < recorded_steps } ->
            next!c_expr { recorded[now.at][0] },c_expr { recorded[now.at][1] },c_expr { recorded[now.at][2] },c_expr { recorded[now.at][3] };
            at++ }
    :: atomic { c_expr { now.at == recorded_steps } -> assert(at == 0 /* accepted */); at++ }
    od
}
#endif
