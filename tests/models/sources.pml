/* A source of one partition, ingested by two instances; its upstream forgets what it is told to, and may begin again at 0.

   What is real behind each step (see docs/design/0225-formal-models.md, and replay_sources.py, which carries them out):
     propose, mint     sources.bindings.Bindings.mint: marks that go further, at the bindings' upper, or another was first;
                       then it proposes again. Without news it is a tick, or nothing if the newest time is young
     look              sources.running.Ingestion._catch_up: t is the least upper of what it writes
     hold, follow      sources.running.Ingestion._move_holds: the bindings' hold follows t, and with it their since
     bind              sources.bindings.Bindings.since: bindings from t on, unless that history is given up
     read              sources.protocol.SourceReader.read: the messages of a window, or Gone, or Diverged by a mark's check
     write             sources.targets.Target.append, first the errors and then the output: what lies beyond its upper
     tell              sources.running.Ingestion._tell: the upstream may forget what is before the bindings' since

   Bounds: M messages; bindings at times 0 to T-1; instances that may stop between any two steps, for ever; the upstream
   begins again RESTARTS times. Two collections: the output and the errors.
   What is not modelled: decoding, envelopes, transactions, handovers of the output (wal.pml), several partitions.

   Address a is the a-th message. bound[t] is the mark that holds from time t on: the first address not covered. */

#ifndef M
#define M 2
#endif
#ifndef T
#define T 3
#endif
#ifndef RESTARTS
#define RESTARTS 1
#endif
#ifndef FORGETS         /* 1: the upstream may once forget what it has, without being told */
#define FORGETS 1
#endif
#ifndef INSTANCES
#define INSTANCES 2
#endif

byte have = 0, first = 0, life = 0;     /* upstream: addresses [first, have) are there; which of its lives it is */
bool lost = false;                      /* it forgot by itself */
byte told = 0;                          /* the furthest mark that it was told */
byte bu = 0, hold = 0;                  /* bindings: upper; the first time that their hold keeps as one by itself */
byte bound[T], blife[T];                /* marks by time, and the life that their check is of */
byte u[2];                              /* uppers of the output and of the errors */
byte out[M], at[M], olife[M];           /* of each address: how often it is in the output, when, and of which life */
/* instances: 0 idle, 6 lost the race for a binding, 4 proposes, 5 minted, 7 looked, 8 held, 1 bound, 2 read, 3 wrote the
   errors, 10 wrote all, 9 has nothing left to write */
byte pc[2], t[2], end[2], low[2], high[2], got[2], sure[2];
bool stopped[2];
hidden byte i, j, x, y;
hidden byte is_once, is_at_its_time, is_whole, is_forward, is_there, is_held, is_one_life;

#ifdef SHOW
#define STEP(who, n, what, arg) printf("@ "); printf(#who); printf(" %d ", n); printf(#what); printf(" %d", arg)
#define LIST(name, from, to) printf(" "); printf(#name); printf("="); j = 0; do :: j < to -> printf("%d,", from[j]); j++ :: else -> break od; printf(";")
inline told_all() {
    printf(" | have=%d first=%d life=%d told=%d upper=%d hold=%d uppers=%d,%d", have, first, life, told, bu, hold, u[0], u[1]);
    LIST(marks, bound, bu); LIST(checks, blife, bu); LIST(out, out, M); LIST(at, at, M); LIST(lives, olife, M);
    printf("\n")
}
#define TELL told_all()
#else
#define STEP(who, n, what, arg) skip
#define TELL skip
#endif

#define MARK(time) ((time) == 0 -> 0 : bound[(time) - 1])
#define LIFE(time) ((time) == 0 -> 0 : blife[(time) - 1])
#define LEAST (u[0] < u[1] -> u[0] : u[1])

inline check() {
    is_once = true; is_at_its_time = true; is_whole = true; is_forward = true; is_one_life = true; i = 0;
    do
    :: i < M ->
        if :: out[i] > 1 -> is_once = false :: else fi;
        y = 0;  /* the time of address i: the first whose mark covers it */
        do :: y < bu && bound[y] <= i -> y++ :: else -> break od;
        if :: out[i] && at[i] != y -> is_at_its_time = false :: else fi;
        if :: y < u[0] && out[i] == 0 -> is_whole = false :: else fi;
        if :: out[i] && y < bu && olife[i] != blife[y] -> is_one_life = false :: else fi;
        i++
    :: else -> break
    od;
    i = 1;
    do :: i < bu -> if :: bound[i] < bound[i - 1] -> is_forward = false :: else fi; i++ :: else -> break od;
    x = LEAST;
    /* what is bound and not durable in all collections is still there, unless the upstream lost it by itself */
    is_there = (life > 0 || lost || first <= MARK(x));
    is_held = (hold <= x);
    assert(is_once); assert(is_at_its_time); assert(is_whole); assert(is_forward); assert(is_one_life);
    assert(is_there); assert(is_held)
}

inline forget(n) { pc[n] = 0; t[n] = 0; end[n] = 0; low[n] = 0; high[n] = 0; got[n] = 0 }

#ifdef MUTANT_marks_may_go_back
#define FURTHER (have != MARK(bu))
#else
#define FURTHER (have > MARK(bu))
#endif
#if defined(MUTANT_old_marks_are_not_verified) || defined(MUTANT_marks_may_go_back)
#define VERIFIED true
#else
#define VERIFIED (MARK(bu) == 0 || LIFE(bu) == life)
#endif
#ifdef MUTANT_checks_of_marks_are_not_compared
#define SAME(n) true
#else
/* the check of the mark where it begins, and of the one where it ends */
#define SAME(n) ((low[n] == 0 || LIFE(t[n]) == life) && LIFE(end[n]) == life)
#endif

/* A minter looks at the newest marks and at the upstream, and proposes; then the shard decides. */
#define MINTS(n) (!stopped[n] && (pc[n] == 0 || pc[n] == 6))
#define MINT(n) \
:: d_step { MINTS(n) && bu < T && FURTHER && VERIFIED -> \
    t[n] = bu; high[n] = have; got[n] = life; pc[n] = 4; STEP(instance, n, propose, have) } \
:: d_step { MINTS(n) && bu < T && !FURTHER && VERIFIED -> \
    t[n] = bu; high[n] = MARK(bu); got[n] = LIFE(bu); pc[n] = 4; STEP(instance, n, tick, bu) } \
:: d_step { MINTS(n) && !FURTHER && VERIFIED -> pc[n] = 5; STEP(instance, n, nothing, bu) } \
:: d_step { MINTS(n) && !VERIFIED -> forget(n); stopped[n] = true; STEP(instance, n, diverged, have) } \
:: d_step { pc[n] == 4 && (bu == t[n] || OVERWRITES(n)) -> \
    bound[t[n]] = high[n]; blife[t[n]] = got[n]; \
    if :: bu == t[n] -> bu++ :: else fi; \
    STEP(instance, n, mint, high[n]); forget(n); pc[n] = 5 } \
LOSES(n)

#ifdef MUTANT_mint_without_comparing
#define OVERWRITES(n) (bu > t[n])
#else
#define OVERWRITES(n) false
#endif
#ifdef MUTANT_own_proposal_instead_of_the_binding
/* it lost the race for the binding, and continues with the mark and the time that it proposed */
#define LOSES(n) \
:: d_step { pc[n] == 4 && bu > t[n] && LEAST == t[n] -> end[n] = t[n] + 1; low[n] = MARK(t[n]); pc[n] = 2; STEP(instance, n, lost, bu) } \
:: d_step { pc[n] == 4 && bu > t[n] && LEAST != t[n] -> forget(n); pc[n] = 6; STEP(instance, n, lost, bu) }
#else
#define LOSES(n) :: d_step { pc[n] == 4 && bu > t[n] -> forget(n); pc[n] = 6; STEP(instance, n, lost, bu) }
#endif

#ifdef MUTANT_hold_follows_the_errors
#define DONE(n) u[1]
#else
#define DONE(n) t[n]
#endif
inline move_hold(n) { if :: hold < DONE(n) -> hold = DONE(n) :: else fi }

#define GIVEN_UP(n) (hold > t[n])
#define LOOK(n) \
:: d_step { !stopped[n] && (pc[n] == 0 || pc[n] == 5) -> t[n] = LEAST; pc[n] = 7; STEP(instance, n, look, t[n]) } \
:: d_step { pc[n] == 7 -> move_hold(n); pc[n] = 8; STEP(instance, n, hold, hold) } \
:: d_step { pc[n] == 8 && GIVEN_UP(n) -> forget(n); STEP(instance, n, passed, hold) } \
:: d_step { pc[n] == 8 && !GIVEN_UP(n) -> \
    if :: t[n] < bu -> end[n] = bu; low[n] = MARK(t[n]); high[n] = MARK(bu); pc[n] = 1 :: else -> forget(n); pc[n] = 9 fi; \
    STEP(instance, n, bind, bu) }

#ifdef MUTANT_begins_where_the_upstream_begins
#define LOST(n) false
#else
#define LOST(n) (low[n] < first)
#endif

#define READ(n) \
:: d_step { pc[n] == 1 && low[n] < high[n] && !SAME(n) -> forget(n); stopped[n] = true; STEP(instance, n, other, life) } \
:: d_step { pc[n] == 1 && low[n] < high[n] && SAME(n) && LOST(n) -> \
    x = LEAST; \
    if  /* others were faster, and what is gone is durable: it starts again. Else it ends, and says so */ \
    :: x > t[n] -> forget(n); STEP(instance, n, late, x) \
    :: else -> forget(n); stopped[n] = true; STEP(instance, n, gone, x) \
    fi } \
:: d_step { pc[n] == 1 && (low[n] == high[n] || (SAME(n) && !LOST(n))) -> \
    got[n] = life; pc[n] = 2; STEP(instance, n, read, high[n]) }

inline add(n) { /* the window's messages at their times, from the output's upper on */
    if
    :: u[0] >= end[n]
    :: else ->
        j = low[n];
        do
        :: j < high[n] ->
            y = t[n];
#ifdef MUTANT_own_proposal_instead_of_the_binding
            skip;
#else
            do :: y < end[n] - 1 && bound[y] <= j -> y++ :: else -> break od;
#endif
            if
#ifdef MUTANT_window_written_as_a_whole
            :: true ->
#else
            :: y >= u[0] ->
#endif
#ifdef MUTANT_begins_where_the_upstream_begins
                if :: j >= first -> out[j]++; at[j] = y; olife[j] = got[n] :: else fi
#else
                out[j]++; at[j] = y; olife[j] = got[n]
#endif
            :: else
            fi;
            j++
        :: else -> break
        od;
        u[0] = end[n]
    fi
}

#define WRITE(n) \
:: d_step { pc[n] == 2 -> if :: u[1] < end[n] -> u[1] = end[n] :: else fi; pc[n] = 3; STEP(instance, n, write_errors, u[1]) } \
:: d_step { pc[n] == 3 -> add(n); \
    t[n] = end[n]; end[n] = 0; low[n] = 0; high[n] = 0; got[n] = 0; pc[n] = 10; STEP(instance, n, write, u[0]) } \
:: d_step { pc[n] == 10 -> move_hold(n); forget(n); pc[n] = 9; STEP(instance, n, follow, hold) }

inline say(mark, its) { /* the upstream forgets what is before a mark of the life that it is in */
    if :: told < mark -> told = mark :: else fi;
    if :: its == life && first < mark -> first = mark :: else fi
}
#ifdef MUTANT_told_what_is_read
#define TELL_UP(n) :: d_step { pc[n] == 2 && told < high[n] -> say(high[n], life); STEP(instance, n, tell, told) } \
:: d_step { pc[n] == 9 -> pc[n] = 0; STEP(instance, n, tell, told) }
#else
#ifdef MUTANT_told_by_the_errors
#define SURE u[1]
#else
#define SURE hold
#endif
/* each instance tells again what it has not told itself */
#define TELL_UP(n) :: d_step { pc[n] == 9 -> \
    if :: sure[n] < SURE -> sure[n] = SURE; say(MARK(sure[n]), LIFE(sure[n])) :: else fi; \
    pc[n] = 0; STEP(instance, n, tell, told) }
#endif

#define INSTANCE(n) MINT(n) LOOK(n) READ(n) WRITE(n) TELL_UP(n)

active proctype sources() {
    do
    :: atomic {
        if
        :: d_step { have < M -> have++; STEP(upstream, 0, message, have) }
        :: d_step { FORGETS && !lost && first < have -> lost = true; first = have; STEP(upstream, 0, forget, first) }
        :: d_step { life < RESTARTS && have > 0 -> life++; have = 0; first = 0; STEP(upstream, 0, begins_again, life) }
        INSTANCE(0)
#if INSTANCES > 1
        INSTANCE(1)
#endif
        fi;
        d_step { TELL; check() }
    }
    od
}
