//! A witness as a whole: a thread for each worker, one that audits, and one that answers.

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::bank::Bank;
use crate::blocks;
use crate::duty::Duty;
use crate::gate::Gate;
use crate::kernel::Log;
use crate::load::Load;
use crate::report::Report;

/// Where its files are: on the machine's disk.
const FILES: &str = "/var/lib/forkd-witness";
/// Where it answers.
const SOCKET: &str = "/run/forkd-witness.sock";
/// Longest question.
const QUESTION_BYTES_MAX: u64 = 16;
/// Most violations that are kept: the first ones tell.
const VIOLATIONS_MAX: usize = 20;
/// How long each worker may take for its next step, on a host that is slow.
const STEP_DEADLINE: Duration = Duration::from_mins(2);
/// How often the auditor looks at the accounts while everybody works.
const AUDIT_EVERY: Duration = Duration::from_millis(50);

type Duties = Vec<Mutex<Box<dyn Duty>>>;

struct Witness {
    load: Load,
    duties: Duties,
    gate: Gate,
    bank: Mutex<Bank>,
    asked: Mutex<u64>,
    violations: Mutex<Vec<String>>,
    kernel: Mutex<Log>,
}

/// Keeps the invariant of a load, and answers, until the end of the machine.
pub fn run(load: Load) -> io::Result<()> {
    fs::create_dir_all(FILES)?;
    let (duties, hurries): (Vec<_>, Vec<_>) = load.posts(Path::new(FILES))?.into_iter().unzip();
    let bank = Bank::new(duties.iter().map(|duty| duty.seq()).collect());
    let witness = Arc::new(Witness {
        load,
        gate: Gate::new(duties.len()),
        duties: duties.into_iter().map(Mutex::new).collect(),
        bank: Mutex::new(bank),
        asked: Mutex::new(0),
        violations: Mutex::new(Vec::new()),
        kernel: Mutex::new(Log::open()?),
    });
    for (who, hurry) in hurries.into_iter().enumerate() {
        let witness = Arc::clone(&witness);
        thread::Builder::new().spawn(move || {
            loop {
                let begun = Instant::now();
                (0..hurry.burst).for_each(|_| witness.step(who));
                witness.gate.pass(who, hurry.rest(begun.elapsed()));
            }
        })?;
    }
    let auditor = Arc::clone(&witness);
    thread::Builder::new().spawn(move || {
        loop {
            auditor.note(auditor.bank().check());
            thread::sleep(AUDIT_EVERY);
        }
    })?;
    witness.answer_all()
}

/// Asks a witness that runs in this machine, and prints its answer.
pub fn ask(question: &str) -> io::Result<()> {
    let mut stream = UnixStream::connect(SOCKET)?;
    stream.write_all(question.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    io::copy(&mut stream, &mut io::stdout().lock()).map(drop)
}

impl Witness {
    fn step(&self, who: usize) {
        let mut duty = lock(&self.duties[who]);
        self.note(duty.step());
        let seq = duty.seq();
        drop(duty);
        self.note(self.bank().transfer(who, seq));
    }

    fn answer_all(&self) -> io::Result<()> {
        // One that a witness before this one has left.
        drop(fs::remove_file(SOCKET));
        let listener = UnixListener::bind(SOCKET)?;
        println!("ready");
        for stream in listener.incoming() {
            self.answer(&stream?)?;
        }
        Ok(())
    }

    fn answer(&self, mut stream: &UnixStream) -> io::Result<()> {
        let mut question = String::new();
        stream.take(QUESTION_BYTES_MAX).read_to_string(&mut question)?;
        let answer = match question.as_str() {
            "look" => self.look().json(),
            "check" => self.check().json(),
            _ => format!("no question: {question}\n"),
        };
        stream.write_all(answer.as_bytes())
    }

    /// How far everybody is, at one instant.
    fn look(&self) -> Report {
        let stopped = self.gate.stop();
        let report = self.report();
        drop(stopped);
        report
    }

    /// Checks everything at one instant, and then that everybody goes on.
    fn check(&self) -> Report {
        let stopped = self.gate.stop();
        let mut pages = self.check_duties(false);
        let mut blocks = self.check_duties(true);
        // What comes from files now comes from the disk.
        self.note(blocks::drop_caches());
        blocks += self.check_duties(true);
        let bank = self.bank();
        self.note(bank.check().map(|count| pages += count));
        self.note(bank.check_last(&self.steps()));
        drop(bank);
        drop(stopped);
        for who in self.gate.wait_for_all(STEP_DEADLINE) {
            self.note::<()>(Err(format!("worker {who} does not go on")));
        }
        Report { pages, blocks, ..self.look() }
    }

    /// Checks what workers keep on the disk, or in memory.  Returns how much of it is right.
    fn check_duties(&self, on_disk: bool) -> u64 {
        let mut right = 0;
        for duty in &self.duties {
            let mut duty = lock(duty);
            if duty.on_disk() == on_disk {
                self.note(duty.check().map(|count| right += count));
            }
        }
        right
    }

    fn report(&self) -> Report {
        let mut asked = lock(&self.asked);
        *asked += 1;
        let mut log = lock(&self.kernel);
        let kernel = match log.complaints() {
            Ok(lines) => lines.to_vec(),
            Err(error) => vec![format!("its log cannot be read: {error}")],
        };
        Report {
            asked: *asked,
            load: self.load.name,
            steps: self.steps(),
            transfers: self.bank().transfers(),
            violations: lock(&self.violations).clone(),
            kernel,
            ..Report::default()
        }
    }

    fn steps(&self) -> Vec<u64> {
        self.duties.iter().map(|duty| lock(duty).seq()).collect()
    }

    fn bank(&self) -> MutexGuard<'_, Bank> {
        lock(&self.bank)
    }

    fn note<T>(&self, found: Result<T, String>) {
        let Err(found) = found else { return };
        let mut violations = lock(&self.violations);
        if violations.len() < VIOLATIONS_MAX {
            violations.push(found);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
