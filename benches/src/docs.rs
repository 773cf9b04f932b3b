//! The page of results in the documentation, between two marks; the words around it are people's.

use std::{fmt::Write as _, fs, path::Path};

use crate::{
    error::Failure,
    goals::{self, Verdict},
    plot,
    record::{Record, Row},
    sections::Section,
    table,
};

const FROM: &str = "<!-- results: written by the suite, --docs -->\n";
const TO: &str = "<!-- end of results -->\n";

/// Puts the records into `performance.md` of a folder, and their picture beside it.
pub(crate) fn write(folder: &Path, sections: &[&Section], records: &[Record]) -> Result<(), Failure> {
    let page = folder.join("performance.md");
    let text = fs::read_to_string(&page).map_err(|source| Failure::Read { path: page.clone(), source })?;
    let text = replaced(&text, &results(sections, records)).ok_or_else(|| Failure::Output {
        program: page.display().to_string(),
        said: "it has no marks where results go".into(),
    })?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Failure::Write { path, source }
    };
    fs::write(&page, text).map_err(failed(&page))?;
    let picture = folder.join("performance.svg");
    fs::write(&picture, plot::svg(records)).map_err(failed(&picture))
}

/// The page with other results.
fn replaced(page: &str, results: &str) -> Option<String> {
    let (before, rest) = page.split_once(FROM)?;
    let (_, after) = rest.split_once(TO)?;
    Some(format!("{before}{FROM}\n{results}\n{TO}{after}"))
}

fn results(sections: &[&Section], records: &[Record]) -> String {
    let mut out = String::new();
    if let Some(record) = records.iter().find(|record| !record.rows.is_empty()) {
        let _ = writeln!(out, "Machine: {}.\n", record.machine);
        for (name, version) in record.binaries.iter().filter(|(name, _)| *name != "ours") {
            let _ = writeln!(out, "Peer: {name} {version}.\n");
        }
    }
    out += "### What is to be reached\n\n| | cores | found | wanted | |\n| --- | --- | --- | --- | --- |\n";
    for outcome in goals::outcomes(records) {
        let mark = match outcome.verdict {
            Verdict::Missed => format!("**{}**", outcome.verdict),
            verdict => verdict.to_string(),
        };
        let _ = writeln!(out, "| {} | {} | {} | {} | {mark} |", outcome.text, outcome.state, outcome.found, outcome.wanted);
    }
    for section in sections {
        let Some(record) = records.iter().find(|record| record.section == section.name) else { continue };
        if record.rows.is_empty() && record.notes.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n### {}\n", section.title);
        if record.rows.is_empty() {
            notes(&mut out, record);
            continue;
        }
        let _ = writeln!(
            out,
            "`make bench ONLY={}`, {} UTC; {} samples dropped.\n",
            record.section, record.date, record.dropped
        );
        section_table(&mut out, record);
        notes(&mut out, record);
    }
    out
}

fn notes(out: &mut String, record: &Record) {
    for note in &record.notes {
        let _ = writeln!(out, "{note}\n");
    }
}

fn section_table(out: &mut String, record: &Record) {
    let subjects = table::subjects(record);
    for metric in table::metrics(record) {
        let _ = writeln!(out, "| {} | depth | client | cores | {} |", table::heading(metric), subjects.join(" | "));
        let _ = writeln!(out, "| --- | --- | --- | --- |{}", " --- |".repeat(subjects.len()));
        for (test, depth, client, state) in table::lines(record) {
            let value = |subject: &&str| {
                let same = |row: &&Row| {
                    row.test == test
                        && row.depth == depth
                        && row.client == client
                        && row.state == state
                        && row.subject == **subject
                };
                let summary = record.rows.iter().find(same).and_then(|row| row.summary(metric));
                summary.map(|summary| {
                    let (median, min, max) =
                        (table::number(summary.median), table::number(summary.min), table::number(summary.max));
                    if summary.samples == 1 { median } else { format!("{median} ({min}–{max}; {})", summary.samples) }
                })
            };
            let values: Vec<Option<String>> = subjects.iter().map(value).collect();
            if values.iter().any(Option::is_some) {
                let depth = if depth == 0 { String::new() } else { depth.to_string() };
                let values: Vec<String> = values.into_iter().map(Option::unwrap_or_default).collect();
                let _ = writeln!(out, "| {test} | {depth} | {client} | {state} | {} |", values.join(" | "));
            }
        }
        out.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::sections;

    #[test]
    fn a_section_of_which_nothing_is_known_has_no_heading() {
        let dir = tempfile::tempdir().unwrap();
        let shown = |note: Option<&str>| {
            let mut record = Record::open(dir.path(), "memory", "m", &BTreeMap::new(), true);
            record.notes.extend(note.map(str::to_owned));
            let section = sections::ALL.iter().find(|section| section.name == "memory").unwrap();
            results(&[section], &[record]).split_once("volumes in memory").map(|(_, rest)| rest.trim().to_owned())
        };
        assert_eq!(shown(None), None);
        assert_eq!(shown(Some("It takes two cores.")).as_deref(), Some("It takes two cores."));
    }

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let page = format!("words\n{FROM}old\n{TO}more words\n");
        assert_eq!(replaced(&page, "new").unwrap(), format!("words\n{FROM}\nnew\n{TO}more words\n"));
        assert_eq!(replaced("no marks", "new"), None);
    }
}
