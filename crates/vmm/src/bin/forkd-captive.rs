//! A zygote, for tests, whose children are machines that were taken over: `jail/captive.rs`.

use std::process::ExitCode;

use forkd_proto::control::{Event, ZygoteConfig};
use forkd_vmm::error::Error;
use forkd_vmm::jail;
use forkd_vmm::sys::output;
use forkd_vmm::zygote::Zygote;
use serde_json::json;

fn main() -> ExitCode {
    let arguments = jail::filter::arguments();
    match arguments.as_slice() {
        [role, option, file] if role == "zygote" && option == "--config" => match zygote(file) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                output::log(error);
                ExitCode::FAILURE
            }
        },
        _ => ExitCode::from(2),
    }
}

fn zygote(file: &str) -> Result<(), Error> {
    let read = std::fs::read(file).map_err(Error::io(format!("read configuration {file}")))?;
    let config = ZygoteConfig::parse(&read)?;
    jail::enter_as_zygote(&config)?;
    let zygote = Zygote::start(&config)?;
    output::say(json!(Event::Listening { pid: std::process::id() }))
        .map_err(Error::io("write to standard output"))?;
    zygote.run()
}
