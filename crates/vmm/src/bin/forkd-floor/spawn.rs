//! What forking machines costs: `n` children of one process, each with a machine of its own.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::time::{Duration, Instant};

use kvm_bindings::CpuId;
use kvm_ioctls::{Kvm, VcpuExit};
use serde_json::{Value, json};
use vm_memory::MmapRegion;

use crate::guest::{self, Failure, PAGE_BYTES};
use crate::words::{milliseconds, number, quantile};

const IMAGE_BYTES: u32 = 256 << 20;
/// Where the guest's stores begin; everything below is its tables and code.
const TOUCHED_FROM: u32 = 16 << 20;

/// Most children of one round: what a fork request may ask for.
const N_MAX: u32 = 10_000;
/// Most measured rounds of one run.
const REPEAT_MAX: u32 = 1_000;
/// Most pages that a guest can dirty: the image ends there.
const TOUCH_MAX: u32 = (IMAGE_BYTES - TOUCHED_FROM) / PAGE_BYTES;

/// Most rounds of one run that are thrown away because a child failed.  An emulated processor shuts
/// one guest in some thousands down, however simple the guest.
const RETRIES_MAX: u32 = 3;

const STAGES: [&str; 6] = ["create_vm", "irqchip", "memslot", "vcpu", "set_state", "run"];
/// What a child writes: its number, then the nanoseconds of its stages.
const ANSWER_BYTES: usize = 8 * (1 + STAGES.len());
/// The number that a child writes when it failed.
const FAILED: u64 = u64::MAX;

/// `test ecx,ecx; jz 1f; 0: inc byte [rsi]; add rsi,4096; dec ecx; jnz 0b; 1: out 0x80,al; jmp 1b`
const PROGRAM: [u8; 21] = [
    0x85, 0xc9, 0x74, 0x0d, 0xfe, 0x06, 0x48, 0x81, 0xc6, 0, 0x10, 0, 0, 0xff, 0xc9, 0x75, 0xf3,
    0xe6, 0x80, 0xeb, 0xfc,
];

#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    n: u32,
    repeat: u32,
    touch: u32,
}

/// Durations of one round.
struct Round {
    wall: Duration,
    children: Vec<Duration>,
    stages: [Duration; STAGES.len()],
}

/// Runs the rounds that `words` ask for, and reports.
pub fn run(words: impl Iterator<Item = String>) -> Result<Value, Failure> {
    let plan = parse(words)?;
    let kvm = Kvm::new()?;
    let cpuid = guest::cpuid(&kvm)?;
    let memory = guest::map(guest::image(IMAGE_BYTES.into(), &PROGRAM)?, IMAGE_BYTES as usize)?;
    let zygote = Zygote { kvm, cpuid, memory, touch: plan.touch };
    let mut retries = RETRIES_MAX;
    let cold = zygote.patient_round(plan.n, &mut retries)?;
    let rounds = (0..plan.repeat)
        .map(|_| zygote.patient_round(plan.n, &mut retries))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(report(plan, &cold, &rounds))
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Plan, Failure> {
    let mut plan = Plan { n: 100, repeat: 4, touch: 64 };
    while let Some(option) = words.next() {
        let (field, least, most) = match option.as_str() {
            "--n" => (&mut plan.n, 1, N_MAX),
            "--repeat" => (&mut plan.repeat, 1, REPEAT_MAX),
            "--touch" => (&mut plan.touch, 0, TOUCH_MAX),
            other => return Err(format!("{other} is none of --n, --repeat, --touch").into()),
        };
        *field = number(&option, words.next(), least..=most)?;
    }
    Ok(plan)
}

/// The process that children are forked from.  It has a single thread.
struct Zygote {
    kvm: Kvm,
    cpuid: CpuId,
    memory: MmapRegion,
    touch: u32,
}

impl Zygote {
    /// Run a round; one in which a child failed is run again while there are `retries`.
    fn patient_round(&self, n: u32, retries: &mut u32) -> Result<Round, Failure> {
        loop {
            match self.round(n) {
                Err(error) if *retries > 0 => eprintln!("a round is run again: {error}"),
                outcome => return outcome,
            }
            *retries -= 1;
        }
    }

    fn round(&self, n: u32) -> Result<Round, Failure> {
        let (mut answers, answer) = io::pipe()?;
        let (released, release) = io::pipe()?;
        let mut pids = Vec::new();
        let mut forked_at = Vec::new();
        let begin = Instant::now();
        for number in 0..n {
            forked_at.push(Instant::now());
            // SAFETY: this process has one thread, so the child finds every lock free.
            match unsafe { libc::fork() } {
                -1 => return Err(io::Error::last_os_error().into()),
                0 => {
                    drop(release);
                    self.live(number, answer, released);
                }
                pid => pids.push(pid),
            }
        }
        drop(answer);
        let result = collect(&mut answers, &forked_at);
        let wall = begin.elapsed();
        drop(release);
        for pid in pids {
            // SAFETY: `pid` is a child of ours that was not waited for; no status is asked for.
            unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
        }
        let (children, stages) = result?;
        Ok(Round { wall, children, stages })
    }

    /// Be a child: answer, stay alive until the zygote lets go, end.
    fn live(&self, number: u32, mut answer: PipeWriter, mut released: PipeReader) -> ! {
        let mut words = [FAILED; 1 + STAGES.len()];
        match self.machine() {
            Ok(stages) => {
                words[0] = number.into();
                for (word, stage) in words[1..].iter_mut().zip(stages) {
                    *word = u64::try_from(stage.as_nanos()).unwrap_or(u64::MAX);
                }
            }
            Err(error) => eprintln!("child {number}: {error}"),
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let said = answer.write_all(&bytes);
        drop(answer);
        let status = i32::from(said.and_then(|()| released.read(&mut [0])).is_err());
        // SAFETY: ends this process without running what its zygote registered to run at exit.
        unsafe { libc::_exit(status) }
    }

    /// Make a machine over this process' view of the image and run it to its answer.
    fn machine(&self) -> Result<[Duration; STAGES.len()], Failure> {
        let mut clock = Stopwatch(Instant::now());
        let vm = self.kvm.create_vm()?;
        let create_vm = clock.lap();
        guest::add_chips(&vm)?;
        let irqchip = clock.lap();
        // SAFETY: `self.memory` is as long as the slot and lives as long as this process.
        unsafe { guest::give(&vm, 0, 0, self.memory.as_ptr(), IMAGE_BYTES as usize) }?;
        let memslot = clock.lap();
        let mut vcpu = vm.create_vcpu(0)?;
        let make_vcpu = clock.lap();
        guest::set_state(&vcpu, &self.cpuid, TOUCHED_FROM.into(), self.touch.into())?;
        let set_state = clock.lap();
        match vcpu.run()? {
            VcpuExit::IoOut(0x80, _) => {}
            other => return Err(format!("the guest left with {other:?}").into()),
        }
        // Machine and vCPU live on until this process ends, as the zygote's clock demands.
        std::mem::forget((vcpu, vm));
        Ok([create_vm, irqchip, memslot, make_vcpu, set_state, clock.lap()])
    }
}

struct Stopwatch(Instant);

impl Stopwatch {
    fn lap(&mut self) -> Duration {
        let before = std::mem::replace(&mut self.0, Instant::now());
        self.0 - before
    }
}

type Answers = (Vec<Duration>, [Duration; STAGES.len()]);

/// Wait for every child's answer; return their latencies, and their stages summed.
fn collect(answers: &mut PipeReader, forked_at: &[Instant]) -> Result<Answers, Failure> {
    let mut children = Vec::new();
    let mut stages = [Duration::ZERO; STAGES.len()];
    for _ in forked_at {
        let mut bytes = [0; ANSWER_BYTES];
        answers.read_exact(&mut bytes)?;
        let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        let number = words.next().unwrap_or(FAILED);
        let forked = usize::try_from(number).ok().and_then(|number| forked_at.get(number));
        children.push(forked.ok_or("a child failed")?.elapsed());
        for (sum, word) in stages.iter_mut().zip(words) {
            *sum += Duration::from_nanos(word);
        }
    }
    Ok((children, stages))
}

fn report(plan: Plan, cold: &Round, rounds: &[Round]) -> Value {
    let walls: Vec<f64> = rounds.iter().map(|round| milliseconds(round.wall)).collect();
    let children: Vec<f64> =
        rounds.iter().flat_map(|round| &round.children).map(|&child| milliseconds(child)).collect();
    let total = f64::from(plan.n) * f64::from(plan.repeat);
    let stage = |index: usize| {
        rounds.iter().map(|round| milliseconds(round.stages[index])).sum::<f64>() / total
    };
    json!({
        "n": plan.n,
        "repeat": plan.repeat,
        "touch": plan.touch,
        "cold_ms": milliseconds(cold.wall),
        "wall_ms": &walls,
        "ms_per_child": quantile(&walls, 50) / f64::from(plan.n),
        "child_ms_p50": quantile(&children, 50),
        "child_ms_p99": quantile(&children, 99),
        "stages_ms": STAGES.iter().enumerate().map(|(i, &name)| (name.to_owned(), stage(i).into()))
            .collect::<serde_json::Map<_, _>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> impl Iterator<Item = String> {
        line.split_whitespace().map(str::to_owned)
    }

    #[test]
    fn options_change_the_plan() {
        let plan = parse(words("--n 1 --touch 0 --repeat 9")).unwrap();
        assert_eq!(plan, Plan { n: 1, repeat: 9, touch: 0 });
    }

    #[test]
    fn a_number_one_past_its_limit_is_refused() {
        for line in ["--n 0", "--n 10001", "--repeat 0", "--repeat 1001", "--touch 61441", "--n"] {
            assert!(parse(words(line)).is_err(), "{line}");
        }
    }
}
