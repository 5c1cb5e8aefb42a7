/* Rows of several commands, which servers commit for their clients.

   What is real behind each step:
     client            shard.remote_commit.commit_by_commands: after no answer it sends the same command, with the same
                       token, to whichever server it reaches
     take              shard.request_queue: what is queued becomes one row
     prepare, commit   shard.group_commit, shard.group_rows.make_group, core.groups.apply_group, shard.committer
     look              shard.committer.until_in_log and shard.dedup_index: which tokens the log has
     answer            shard.group_commit: each command by itself: committed, or refused

   Bounds: CLIENTS clients, one append each, all for the same time, or for the next one (`placed`); two servers, of which
   each may stop between any two steps, for ever; each server is in doubt once.
   What is not modelled: leases and objects of the writers (shard.pml), rights, room in a row, commands that are alone. */

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
byte queue[2];                          /* at each server, as bits */
byte spc[2], base[2], group[2], doubts = 0;    /* group: what is in the row */
bool fly[2], in[2];
hidden byte i, j, x, y;
hidden byte is_once, is_answered, is_contiguous;

#define B(n) (1 << (n))
#ifdef SHOW
#define STEP(who, n, what, arg) printf("@ "); printf(#who); printf(" %d ", n); printf(#what); printf(" %d", arg)
#define TELL printf(" | seq=%d upper=%d applied=%d,%d said=%d,%d\n", seq, upper, applied[0], applied[1], said[0], said[1])
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

/* one command after the other; what is refused does not stop those behind it */
inline apply_group(s) {
    seq++; y = 0; j = 0;
    do
    :: j < CLIENTS ->
        if
#ifdef MUTANT_tokens_are_not_looked_up
        :: (group[s] & B(j)) && (wants[j] == 9 || wants[j] == upper) -> applied[j]++; upper++
#else
        :: (group[s] & B(j)) && !applied[j] && (wants[j] == 9 || wants[j] == upper) -> applied[j]++; upper++
#endif
#ifdef MUTANT_refused_commands_move_upper
        :: (group[s] & B(j)) && !applied[j] && wants[j] != 9 && wants[j] != upper -> upper++
#endif
        :: else
        fi;
        j++
    :: else -> break
    od
}

#ifdef MUTANT_refusal_told_while_a_copy_is_on_its_way
#define CERTAIN true
#else
#define CERTAIN false
#endif

inline answer(s) {
    j = 0;
    do
    :: j < CLIENTS ->
        if
        :: (group[s] & B(j)) && !said[j] ->
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
        j++
    :: else -> break
    od;
    group[s] = 0; spc[s] = 0; base[s] = 0; fly[s] = false; in[s] = false
}

inline some_change(s) { /* x: whether a command of the group changes anything at the newest state */
    x = 0; y = upper; j = 0;
    do
#ifdef MUTANT_tokens_are_not_looked_up
    :: j < CLIENTS -> if :: (group[s] & B(j)) && (wants[j] == 9 || wants[j] == y) -> x = 1; y++ :: else fi; j++
#else
    :: j < CLIENTS -> if :: (group[s] & B(j)) && !applied[j] && (wants[j] == 9 || wants[j] == y) -> x = 1; y++ :: else fi; j++
#endif
    :: else -> break
    od
}

#define CLIENT(c) \
:: d_step { !said[c] && sends[c] < SENDS && !(queue[0] & B(c)) -> queue[0] = queue[0] | B(c); sends[c]++; STEP(client, c, send, 0) } \
:: d_step { !said[c] && sends[c] < SENDS && !(queue[1] & B(c)) -> queue[1] = queue[1] | B(c); sends[c]++; STEP(client, c, send, 1) }

#define LOOKS(s) \
:: d_step { spc[s] == 2 && in[s] -> answer(s); STEP(server, s, found, seq) } \
:: d_step { spc[s] == 2 && !in[s] && seq > base[s] -> fly[s] = false; spc[s] = 1; STEP(server, s, not_found, seq) }

#define SERVER(s) \
:: d_step { spc[s] == 0 && queue[s] != 0 -> group[s] = queue[s]; queue[s] = 0; spc[s] = 1; STEP(server, s, take, group[s]) } \
:: d_step { spc[s] == 1 -> some_change(s); \
    if :: x -> base[s] = seq; spc[s] = 3 :: else -> answer(s) fi; STEP(server, s, prepare, seq) } \
:: d_step { spc[s] == 3 && seq == base[s] -> apply_group(s); answer(s); STEP(server, s, commit, seq) } \
:: d_step { spc[s] == 3 && seq != base[s] -> spc[s] = 1; STEP(server, s, lost, seq) } \
:: d_step { spc[s] == 3 && seq == base[s] && doubts < DOUBTS -> doubts++; apply_group(s); in[s] = true; spc[s] = 2; STEP(server, s, unknown, seq) } \
:: d_step { spc[s] == 3 && seq == base[s] && doubts < DOUBTS -> doubts++; fly[s] = true; spc[s] = 2; STEP(server, s, late, seq) } \
:: d_step { spc[s] == 2 && fly[s] && seq == base[s] -> apply_group(s); fly[s] = false; in[s] = true; STEP(server, s, arrive, seq) } \
LOOKS(s)

active proctype groups() {
    /* all for the first time, or the last one for wherever upper is */
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
