//! `forkd-vmm`: one machine, or one zygote, per process.
//!
//! ```text
//! forkd-vmm machine --config FILE   boot a machine
//! forkd-vmm zygote --config FILE    hold a snapshot, fork machines from it
//! forkd-vmm compare --config FILE   say how the files of two disks differ, as JSON
//! forkd-vmm inspect STATE           describe a state file, as JSON
//! forkd-vmm cell CONFIG -- PROGRAM… run a program that is not ours in a jail of its own
//! forkd-vmm users PID UID RANGE…    make a user namespace for the siblings of a machine
//! forkd-vmm jail FOLDER [UID GROUP] can this host jail a process?  Without, one that is not root
//! forkd-vmm probe | cpu             can KVM run a stock guest?  What does that see?  As JSON
//! ```
//!
//! `protocol/control/PROTOCOL.md` says what they print, and what options at the end mean.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forkd_proto::compare::CompareConfig;
use forkd_proto::control::{Event, MachineConfig, ZygoteConfig};
use forkd_vmm::control::server::{self, Server};
use forkd_vmm::error::Error;
use forkd_vmm::io::bus::End;
use forkd_vmm::jail::{self, filter};
use forkd_vmm::machine::Machine;
use forkd_vmm::snapshot::state::MachineState;
use forkd_vmm::sys::{descriptors, output, process, sharing};
use forkd_vmm::zygote::{Zygote, seed};
use serde::Serialize;
use serde_json::json;

const USAGE: &str = "usage: forkd-vmm machine|zygote|compare --config FILE | inspect STATE | \
                     cell CONFIG -- PROGRAM… | users PID UID RANGE… | jail FOLDER … | probe | cpu";

fn main() -> ExitCode {
    process::one_arena();
    let arguments = sharing::begin(filter::arguments());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["machine", "--config", file] => machine(Path::new(file)),
        ["zygote", "--config", file] => zygote(Path::new(file)),
        ["compare", "--config", file] => compare(Path::new(file)),
        ["inspect", file] => MachineState::read(Path::new(file)).and_then(|it| say(&it.describe())),
        ["cpu"] => forkd_vmm::kvm::cpuid::offered().and_then(|it| say(&it)),
        ["probe"] => say(&forkd_vmm::boot::probe::probe()),
        ["cell", config, "--", program @ ..] => jail::cell::run(config, program),
        ["users", pid, uid, ranges @ ..] => jail::users::make(pid, uid, ranges),
        ["jail", at, ids @ ..] => jail::try_out(Path::new(at), ids).and_then(|it| say(&it)),
        _ => {
            output::log(USAGE);
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let (code, message) = (error.code(), error.to_string());
            // Whoever does not hear of it sees the status.
            drop(say(&Event::Failed { id: None, stage: None, code, message, attempts: None }));
            ExitCode::FAILURE
        }
    }
}

fn say(what: &impl Serialize) -> Result<(), Error> {
    output::say(json!(what)).map_err(Error::io("write to standard output"))
}

fn read_config(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(Error::io(format!("read configuration {}", path.display())))
}

fn machine(path: &Path) -> Result<(), Error> {
    descriptors::raise_file_limit();
    let config = MachineConfig::parse(&read_config(path)?)?;
    jail::enter_as_machine(&config)?;
    let place = server::place(PathBuf::from(&config.directory))?;
    let machine = Machine::boot(&config, &place)?;
    let mut server = Server::new(machine, place, None, seed::live)?;
    server.open()?;
    say(&Event::Listening { pid: std::process::id() })?;
    server.machine().resume()?;
    if let End::Error(message) = server.run() {
        output::log(format_args!("the machine ended: {message}"));
        process::exit_now(1)
    }
    Ok(())
}

fn zygote(path: &Path) -> Result<(), Error> {
    let config = ZygoteConfig::parse(&read_config(path)?)?;
    jail::enter_as_zygote(&config)?;
    let zygote = Zygote::start(&config)?;
    say(&Event::Listening { pid: std::process::id() })?;
    zygote.run()
}

fn compare(path: &Path) -> Result<(), Error> {
    say(&forkd_vmm::disk::compare::run(&CompareConfig::parse(&read_config(path)?)?)?)
}
