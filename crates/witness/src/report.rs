//! Answers, as JSON.

/// What a witness says of itself.
#[derive(Debug, Default)]
pub struct Report {
    /// Which question this answers, counted since the start.
    pub asked: u64,
    /// What it was told to do.
    pub load: &'static str,
    /// How far each worker is.
    pub steps: Vec<u64>,
    /// Steps of all workers, as the bank has counted them.
    pub transfers: u64,
    /// Pages of memory that were checked for this answer.
    pub pages: u64,
    /// Blocks of files that were: once as the kernel has them, once as the disk has.
    pub blocks: u64,
    /// What was found wrong since the start.
    pub violations: Vec<String>,
    /// What the kernel complains of.
    pub kernel: Vec<String>,
}

impl Report {
    /// One line of JSON.
    pub fn json(&self) -> String {
        let numbers = |all: &[u64]| all.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let lines =
            |all: &[String]| all.iter().map(|one| quoted(one)).collect::<Vec<_>>().join(",");
        let fields = [
            ("asked", self.asked.to_string()),
            ("load", quoted(self.load)),
            ("steps", format!("[{}]", numbers(&self.steps))),
            ("transfers", self.transfers.to_string()),
            ("pages", self.pages.to_string()),
            ("blocks", self.blocks.to_string()),
            ("violations", format!("[{}]", lines(&self.violations))),
            ("kernel", format!("[{}]", lines(&self.kernel))),
        ];
        let fields = fields.map(|(name, value)| format!("\"{name}\":{value}"));
        format!("{{{}}}\n", fields.join(","))
    }
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            ' '..='~' => quoted.push(character),
            // Nobody who asks needs to know which.
            _ => quoted.push('?'),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_line_of_json() {
        let report = Report {
            asked: 2,
            load: "idle",
            steps: vec![3, 4],
            violations: vec!["a \"b\"\\\né".into()],
            ..Report::default()
        };
        assert_eq!(
            report.json(),
            "{\"asked\":2,\"load\":\"idle\",\"steps\":[3,4],\"transfers\":0,\"pages\":0,\
             \"blocks\":0,\"violations\":[\"a \\\"b\\\"\\\\??\"],\"kernel\":[]}\n"
        );
    }
}
