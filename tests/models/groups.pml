/* Rows of several commands, which servers commit for their clients.

   What is real behind each step (see docs/design/0225-formal-models.md, and replay_groups.py, which carries them out):
     send              shard.commit.commit_by_commands: after no answer it sends the same command, with the same
                       token, to whichever server it reaches, and waits for the answer to what it sent last
     take              shard.group_commit.Funnel.turn, shard.requests: what is queued, in its order, becomes one row
                       (shard.group_commit.prepare_group, core.groups), unless nothing of it changes anything
     commit            shard.committer.carry_out: one compare-and-set; after a lost race (again) the row is made anew
     found, not found  shard.committer.until_in_log and shard.dedup_index: which tokens the log has
     answer            Funnel.tell: each command by itself: committed, or refused, or it may still be committed

   Bounds: CLIENTS clients, one append each, all for the same time, or for the next one (`placed`); two servers, of which
   each may stop between any two steps, for ever; DOUBTS rows in doubt; each client sends SENDS times.
   What is not modelled: leases and objects of the writers (shard.pml), rights, room in a row, commands that are alone.

   A queue is a number in base 4: its digits, the lowest first, are clients from 1 on. */

#ifndef CLIENTS
#define CLIENTS 2
#endif
#ifndef DOUBTS
#define DOUBTS 1
#endif
#ifndef SENDS
#define SENDS 2
#endif

byte seq = 0, upper = 0;
byte applied[CLIENTS];                  /* how often an append came into the trace */
byte said[CLIENTS], sends[CLIENTS];     /* 1: committed, 2: refused for certain */
byte wants[CLIENTS];                    /* its lower; 9: wherever upper is */
byte q[2], g[2];                        /* at each server: what waits, and what it is at */
byte qlast[2], glast[2];                /* for whom that is what they sent last, as bits */
byte spc[2], base[2], doubts = 0;
bool fly[2], in[2];
hidden byte i, j, x, y, rest;
hidden byte is_once, is_answered, is_contiguous;

#define B(n) (1 << (n))
#ifdef SHOW
#define STEP(who, n, what, arg) printf("@ "); printf(#who); printf(" %d ", n); printf(#what); printf(" %d", arg)
#define LIST(name) printf(" "); printf(#name); printf("="); j = 0; do :: j < CLIENTS -> printf("%d,", name[j]); j++ :: else -> break od
inline told_all() { printf(" | seq=%d upper=%d", seq, upper); LIST(applied); LIST(said); LIST(wants); printf("\n") }
#define TELL told_all()
#else
#define STEP(who, n, what, arg) skip
#define TELL skip
#endif

inline check() {
    is_once = true; is_answered = true; i = 0; y = 0;
    do
    :: i < CLIENTS ->
        if :: applied[i] > 1 -> is_once = false :: else fi;
        if :: (said[i] == 1 && applied[i] != 1) || (said[i] == 2 && applied[i] != 0) -> is_answered = false :: else fi;
        y = y + applied[i];
        i++
    :: else -> break
    od;
    is_contiguous = (y == upper);
    assert(is_once); assert(is_answered); assert(is_contiguous)
}

#ifdef MUTANT_tokens_are_not_looked_up
#define DONE_BEFORE false
#else
#define DONE_BEFORE (applied[j] > 0)
#endif
#define FITS(at) (wants[j] == 9 || wants[j] == (at))

/* one command after the other; what is refused does not stop those behind it */
inline apply_group(s) {
    seq++; rest = g[s];
    do
    :: rest != 0 ->
        j = (rest & 3) - 1;
        if
        :: !DONE_BEFORE && FITS(upper) -> applied[j]++; upper++
#ifdef MUTANT_refused_commands_move_upper
        :: !DONE_BEFORE && !FITS(upper) -> upper++
#endif
        :: else
        fi;
        rest = rest >> 2
    :: else -> break
    od
}

#ifdef MUTANT_refusal_told_while_a_copy_is_on_its_way
#define CERTAIN true
#else
#define CERTAIN false
#endif

inline answer(s) {
    rest = g[s];
    do
    :: rest != 0 ->
        j = (rest & 3) - 1;
        if
        :: (glast[s] & B(j)) && !said[j] ->
#ifdef MUTANT_all_are_answered_alike
            said[j] = 1
#else
            /* a refusal is told where no later state takes the command, or where there is no other copy of it */
            if
            :: applied[j] -> said[j] = 1
            :: !applied[j] && (CERTAIN || (wants[j] != 9 && wants[j] < upper) || sends[j] == 1) -> said[j] = 2
            :: else
            fi
#endif
        :: else
        fi;
        rest = rest >> 2
    :: else -> break
    od;
    g[s] = 0; glast[s] = 0; spc[s] = 0; base[s] = 0; fly[s] = false; in[s] = false
}

inline decide(s) { /* make a row at the newest state, or answer if no command changes anything there */
    x = 0; y = upper; rest = g[s];
    do
    :: rest != 0 ->
        j = (rest & 3) - 1;
        if :: !DONE_BEFORE && FITS(y) -> x = 1; y++ :: else fi;
        rest = rest >> 2
    :: else -> break
    od;
    if :: x -> base[s] = seq; spc[s] = 3 :: else -> answer(s) fi
}

inline queued(s, c) { /* x: how long the queue is; y: whether the client is in it */
    x = 0; y = 0; rest = q[s];
    do
    :: rest != 0 -> if :: (rest & 3) == c + 1 -> y = 1 :: else fi; x++; rest = rest >> 2
    :: else -> break
    od
}

#define WAITS(s, c) ((q[s] & 3) == c + 1 || ((q[s] >> 2) & 3) == c + 1 || ((q[s] >> 4) & 3) == c + 1)
#define SEND(s, c) \
:: d_step { !said[c] && sends[c] < SENDS && !WAITS(s, c) -> \
    queued(s, c); q[s] = q[s] | ((c + 1) << (2 * x)); sends[c]++; \
    qlast[0] = qlast[0] & ~B(c); qlast[1] = qlast[1] & ~B(c); glast[0] = glast[0] & ~B(c); glast[1] = glast[1] & ~B(c); \
    qlast[s] = qlast[s] | B(c); STEP(client, c, send, s) }
#define CLIENT(c) SEND(0, c) SEND(1, c)

#define SERVER(s) \
:: d_step { spc[s] == 0 && q[s] != 0 -> \
    g[s] = q[s]; q[s] = 0; glast[s] = qlast[s]; qlast[s] = 0; decide(s); STEP(server, s, take, seq) } \
:: d_step { spc[s] == 3 && seq == base[s] -> apply_group(s); answer(s); STEP(server, s, commit, seq) } \
:: d_step { spc[s] == 3 && seq != base[s] -> decide(s); STEP(server, s, again, seq) } \
:: d_step { spc[s] == 3 && seq == base[s] && doubts < DOUBTS -> doubts++; apply_group(s); in[s] = true; spc[s] = 2; STEP(server, s, unknown, seq) } \
:: d_step { spc[s] == 3 && seq == base[s] && doubts < DOUBTS -> doubts++; fly[s] = true; spc[s] = 2; STEP(server, s, late, seq) } \
:: d_step { spc[s] == 2 && fly[s] && seq == base[s] -> apply_group(s); fly[s] = false; in[s] = true; STEP(server, s, arrive, seq) } \
:: d_step { spc[s] == 2 && in[s] -> answer(s); STEP(server, s, found, seq) } \
:: d_step { spc[s] == 2 && !in[s] && seq == base[s] -> apply_group(s); answer(s); STEP(server, s, sent_again, seq) } \
:: d_step { spc[s] == 2 && !in[s] && seq > base[s] -> fly[s] = false; decide(s); STEP(server, s, not_found, seq) }

active proctype groups() {
    /* all for the first time, or the last one for the next, or for wherever upper is */
    if :: wants[CLIENTS - 1] = 9 :: wants[CLIENTS - 1] = 1 :: skip fi;
    do
    :: atomic {
        if
        CLIENT(0)
#if CLIENTS > 1
        CLIENT(1)
#endif
#if CLIENTS > 2
        CLIENT(2)
#endif
        SERVER(0)
        SERVER(1)
        fi;
        d_step { TELL; check() }
    }
    od
}
