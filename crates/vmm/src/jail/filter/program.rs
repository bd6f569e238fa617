//! Lists of system calls as programs of the kernel's (classic BPF, seccomp(2)).
//!
//! Each child of a fork has the kernel check and translate such a program, and each `KVM_RUN` runs
//! two of them, so they are short: a call that may be made in any way takes one instruction, and
//! arguments are loaded once.  Calls whose arguments are looked at come first, in the order of the
//! list; the kernel knows the verdict on the others without running anything.

use seccompiler::{BpfProgram, SeccompAction, sock_filter};

use super::ANY_PID;
use super::lists::{Allowed, Test, Way};

/// `linux/audit.h`, of x86-64.
const ARCHITECTURE: u32 = 0xc000_003e;
/// Where `struct seccomp_data` has the call's number, the architecture, and the first argument.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;
const ARGUMENT_BYTES: u32 = 8;

/// `linux/bpf_common.h`.
const LOAD: u16 = 0x20;
const RETURN: u16 = 0x06;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_GREATER: u16 = 0x25;
const JUMP_IF_AT_LEAST: u16 = 0x35;
const JUMP_IF_ANY_BIT: u16 = 0x45;

/// Where a jump leads.
#[derive(Clone, Copy)]
enum Target {
    Next,
    /// Behind the way that it is in.
    OtherWay,
    /// To the end of the block, where the call is allowed.
    Allow,
}

/// An instruction whose jumps are not counted yet: what it does, with which number, and where it
/// leads if that holds and if not.
type Step = (u16, u32, Target, Target);

/// A list that has more calls, or more ways for one, than a jump can pass over.
#[derive(Debug)]
pub(super) struct Unfit;

/// Returns the program that allows these calls, and traps all others.
///
/// Of a call that is there again, in another part of the list, the first counts.
pub(super) fn of(list: &[&[Allowed]]) -> Result<BpfProgram, Unfit> {
    let calls: Vec<_> = list.iter().copied().flatten().collect();
    let again = |index: usize| calls[..index].iter().any(|known| known.call == calls[index].call);
    let calls = (0..calls.len()).filter(|index| !again(*index)).map(|index| calls[index]);
    let (any, some): (Vec<&Allowed>, Vec<_>) = calls.partition(|allowed| allowed.ways.is_empty());
    let mut program = vec![
        plain(LOAD, ARCHITECTURE_AT),
        jump(JUMP_IF_EQUAL, ARCHITECTURE, 1, 0),
        plain(RETURN, SeccompAction::KillProcess.into()),
        plain(LOAD, NUMBER_AT),
    ];
    for allowed in some {
        let block = block_of(allowed.ways)?;
        program.push(jump(JUMP_IF_EQUAL, number(allowed)?, 0, distance(block.len())?));
        program.extend(block);
    }
    for (index, allowed) in any.iter().enumerate() {
        let to_allow = distance(any.len() - index)?;
        program.push(jump(JUMP_IF_EQUAL, number(allowed)?, to_allow, 0));
    }
    program.push(plain(RETURN, SeccompAction::Trap.into()));
    program.push(plain(RETURN, SeccompAction::Allow.into()));
    Ok(program)
}

/// What becomes of a call that may be made in these ways alone.
fn block_of(ways: &[Way]) -> Result<Vec<sock_filter>, Unfit> {
    let mut steps = Vec::new();
    // Behind which step the way ends that a step is of.
    let mut ends = Vec::new();
    // Which argument is loaded, by whichever of its tests a way was left.
    let mut loaded = None;
    for way in ways {
        for (index, test) in way.iter().enumerate() {
            let argument = argument_of(*test);
            if loaded.replace(argument) != Some(argument) {
                let at = ARGUMENTS_AT + ARGUMENT_BYTES * u32::from(argument);
                steps.push((LOAD, at, Target::Next, Target::Next));
            }
            let held = if index + 1 == way.len() { Target::Allow } else { Target::Next };
            steps.extend(steps_of(*test, held));
        }
        loaded = loaded.filter(|last| way.iter().all(|test| argument_of(*test) == *last));
        ends.resize(steps.len(), steps.len());
    }
    let trap = steps.len();
    let mut block = Vec::with_capacity(trap + 2);
    for (index, (code, value, then, otherwise)) in steps.into_iter().enumerate() {
        let over = |target| match target {
            Target::Next => Ok(0),
            Target::OtherWay => distance(ends[index] - index - 1),
            Target::Allow => distance(trap - index),
        };
        block.push(jump(code, value, over(then)?, over(otherwise)?));
    }
    block.push(plain(RETURN, SeccompAction::Trap.into()));
    block.push(plain(RETURN, SeccompAction::Allow.into()));
    Ok(block)
}

/// Looks at the argument that is loaded; goes on to `held` if the test holds.
fn steps_of(test: Test, held: Target) -> Vec<Step> {
    let other = Target::OtherWay;
    match test {
        Test::Is(_, value) => vec![(JUMP_IF_EQUAL, value, held, other)],
        Test::IsNot(_, value) => vec![(JUMP_IF_EQUAL, value, other, held)],
        Test::Lacks(_, bits) => vec![(JUMP_IF_ANY_BIT, bits, other, held)],
        Test::Within(_, least, most) => vec![
            (JUMP_IF_AT_LEAST, least, Target::Next, other),
            (JUMP_IF_GREATER, most, other, held),
        ],
        Test::OwnPid(_) => vec![(JUMP_IF_EQUAL, ANY_PID, held, other)],
    }
}

fn argument_of(test: Test) -> u8 {
    match test {
        Test::Is(argument, _)
        | Test::IsNot(argument, _)
        | Test::Lacks(argument, _)
        | Test::Within(argument, _, _)
        | Test::OwnPid(argument) => argument,
    }
}

fn number(allowed: &Allowed) -> Result<u32, Unfit> {
    u32::try_from(allowed.call).map_err(|_| Unfit)
}

fn distance(over: usize) -> Result<u8, Unfit> {
    u8::try_from(over).map_err(|_| Unfit)
}

fn plain(code: u16, value: u32) -> sock_filter {
    jump(code, value, 0, 0)
}

fn jump(code: u16, value: u32, then: u8, otherwise: u8) -> sock_filter {
    sock_filter { code, jt: then, jf: otherwise, k: value }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use seccompiler::{
        SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
    };

    use super::super::Role;
    use super::*;

    const ROLES: [Role; 5] =
        [Role::Process, Role::Vcpu, Role::Writer, Role::Holder, Role::Comparer];
    const I386: u32 = 0x4000_0003;

    /// A call, as the kernel shows it to a program.
    #[derive(Clone, Copy, Debug)]
    struct Call {
        architecture: u32,
        number: u32,
        arguments: [u32; 6],
    }

    /// What a program says to a call, by the rules of the kernel's Documentation/networking/filter.
    fn verdict(program: &[sock_filter], call: &Call) -> u32 {
        let (mut at, mut loaded) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let holds = match code {
                LOAD => {
                    loaded = match k {
                        NUMBER_AT => call.number,
                        ARCHITECTURE_AT => call.architecture,
                        _ => {
                            let (index, rest) = ((k - ARGUMENTS_AT) / 8, (k - ARGUMENTS_AT) % 8);
                            assert_eq!(rest, 0, "half of an argument");
                            call.arguments[index as usize]
                        }
                    };
                    continue;
                }
                RETURN => return k,
                AND => {
                    loaded &= k;
                    continue;
                }
                JUMP => {
                    at += k as usize;
                    continue;
                }
                JUMP_IF_EQUAL => loaded == k,
                JUMP_IF_GREATER => loaded > k,
                JUMP_IF_AT_LEAST => loaded >= k,
                JUMP_IF_ANY_BIT => loaded & k != 0,
                other => panic!("an instruction {other:#x}"),
            };
            at += usize::from(if holds { jt } else { jf });
        }
    }

    const AND: u16 = 0x54;
    const JUMP: u16 = 0x05;

    /// The same list, as seccompiler makes a program of it.
    fn reference(list: &[&[Allowed]]) -> BpfProgram {
        let condition = |argument, operator, value: u32| {
            let length = SeccompCmpArgLen::Dword;
            SeccompCondition::new(argument, length, operator, value.into()).unwrap()
        };
        let conditions = |test: &Test| match *test {
            Test::Is(argument, value) => vec![condition(argument, SeccompCmpOp::Eq, value)],
            Test::IsNot(argument, value) => vec![condition(argument, SeccompCmpOp::Ne, value)],
            Test::Lacks(argument, bits) => {
                vec![condition(argument, SeccompCmpOp::MaskedEq(bits.into()), 0)]
            }
            Test::Within(argument, least, most) => vec![
                condition(argument, SeccompCmpOp::Ge, least),
                condition(argument, SeccompCmpOp::Le, most),
            ],
            Test::OwnPid(argument) => vec![condition(argument, SeccompCmpOp::Eq, ANY_PID)],
        };
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        for allowed in list.iter().copied().flatten() {
            let way_of = |way: &Way| SeccompRule::new(way.iter().flat_map(conditions).collect());
            rules.insert(
                allowed.call,
                allowed.ways.iter().map(|way| way_of(way).unwrap()).collect(),
            );
        }
        let (trap, allow) = (SeccompAction::Trap, SeccompAction::Allow);
        let filter = SeccompFilter::new(rules, trap, allow, TargetArch::x86_64);
        filter.unwrap().try_into().unwrap()
    }

    /// Each number that a list asks about an argument, and those beside it.
    fn telling(list: &[&[Allowed]]) -> BTreeMap<i64, BTreeSet<u32>> {
        let mut found: BTreeMap<i64, BTreeSet<u32>> = BTreeMap::new();
        for allowed in list.iter().copied().flatten() {
            let numbers = found.entry(allowed.call).or_default();
            for test in allowed.ways.iter().copied().flatten() {
                let (least, most) = match *test {
                    Test::Is(_, value) | Test::IsNot(_, value) | Test::Lacks(_, value) => {
                        (value, value)
                    }
                    Test::Within(_, least, most) => (least, most),
                    Test::OwnPid(_) => (ANY_PID, ANY_PID),
                };
                for value in [least, most] {
                    numbers.extend([value.wrapping_sub(1), value, value.wrapping_add(1)]);
                }
            }
            numbers.extend([0, u32::MAX]);
        }
        found
    }

    /// Calls of one number: with each triple of these arguments, whose fourth and on are none's.
    fn calls_of(number: u32, values: &BTreeSet<u32>) -> Vec<Call> {
        let mut calls = Vec::new();
        let few: Vec<u32> = values.iter().copied().collect();
        // Only the second argument of `ioctl` is ever looked at, which has the most numbers.
        let others = if few.len() > 40 { &few[..1] } else { &few[..] };
        for first in others {
            for second in &few {
                for third in others {
                    let arguments = [*first, *second, *third, 0, 0, 0];
                    calls.push(Call { architecture: ARCHITECTURE, number, arguments });
                }
            }
        }
        calls
    }

    /// Ways that look at several arguments, one after the other, which ours do not do yet.
    const MIXED: &[Allowed] = &[
        Allowed {
            call: 1,
            ways: &[
                &[Test::Is(0, 1), Test::Is(1, 2)],
                &[Test::Is(1, 3)],
                &[Test::IsNot(1, 4), Test::Within(1, 3, 9), Test::Lacks(0, 8)],
                &[Test::Lacks(0, 3)],
                &[Test::Is(2, 7)],
            ],
        },
        Allowed { call: 2, ways: &[] },
    ];

    #[test]
    fn a_program_says_what_seccompiler_s_would_say() {
        for list in ROLES.map(Role::list).into_iter().chain([&[MIXED][..]]) {
            let (ours, theirs) = (of(list).unwrap(), reference(list));
            let telling = telling(list);
            let none = BTreeSet::from([0]);
            let mut allowed = 0;
            for number in (0..600).chain(0x4000_0000..0x4000_0258).chain([u32::MAX]) {
                let values = telling.get(&i64::from(number)).unwrap_or(&none);
                for call in calls_of(number, values) {
                    let said = verdict(&ours, &call);
                    assert_eq!(said, verdict(&theirs, &call), "{call:?} of {list:?}");
                    allowed += usize::from(said == u32::from(SeccompAction::Allow));
                    let foreign = Call { architecture: I386, ..call };
                    assert_eq!(verdict(&ours, &foreign), u32::from(SeccompAction::KillProcess));
                }
            }
            assert!(allowed >= telling.len(), "only {allowed} are allowed of {list:?}");
        }
    }

    #[test]
    fn a_program_is_a_fraction_as_long_as_seccompiler_s() {
        for role in ROLES {
            let (ours, theirs) = (of(role.list()).unwrap().len(), reference(role.list()).len());
            assert!(ours * 2 < theirs, "{role:?}: {ours} of {theirs}");
        }
    }

    #[test]
    fn a_list_that_jumps_cannot_pass_over_is_refused() {
        const WAYS: [Way; 254] = [&[Test::Is(0, 1)]; 254];
        const TOO_MANY: &[Allowed] = &[Allowed { call: 1, ways: &WAYS }];
        const MOST: &[Allowed] = &[Allowed { call: 1, ways: WAYS.split_at(252).0 }];

        assert!(of(&[MOST]).is_ok());
        assert!(of(&[TOO_MANY]).is_err());
        let numbers: Vec<_> = (0..256).map(|call| Allowed { call, ways: &[] }).collect();
        assert!(of(&[&numbers[..255]]).is_ok());
        assert!(of(&[&numbers]).is_err());
    }
}
