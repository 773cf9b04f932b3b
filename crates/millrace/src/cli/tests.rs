//! The command line as a whole, and as the documentation has it.

use std::{fs, path::Path};

use clap::{
    CommandFactory,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::*;

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn help_says_which_transfers_are_possible() {
    let cli = Cli::command();
    let create = cli.find_subcommand("device").and_then(|device| device.find_subcommand("create")).unwrap();
    let mdts = create.get_arguments().find(|argument| argument.get_long() == Some("mdts")).unwrap();
    let possible = format!("a power of two from {} to {}", NvmeSpec::LEAST_MDTS, NvmeSpec::MOST_MDTS);
    assert!(mdts.get_help().unwrap().to_string().contains(&possible));
}

/// The commands in a page: lines of code that begin with the program's name, and those in a sentence.
fn commands(page: &str) -> Vec<String> {
    let page = page.replace("\\\n", " ");
    let lines = page.lines().filter(|line| line.starts_with("    ")).map(str::trim);
    let whole = lines.filter(|line| line.starts_with("millrace ")).map(str::to_owned);
    let quoted = page.split('`').skip(1).step_by(2).filter(|code| code.starts_with("millrace ") && !code.contains('\n'));
    whole.chain(quoted.map(str::to_owned)).collect()
}

/// A command's words as a shell sees them, up to what is no longer its own.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for letter in command.chars().chain([' ']) {
        match (quote, letter) {
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), _) if open == letter => quote = None,
            (None, ' ') if word.is_empty() => {}
            (None, ' ') if ["#", "|", "&", "&&", ">", "…", "..."].contains(&word.as_str()) => return words,
            (None, ' ') => words.push(std::mem::take(&mut word)),
            _ => word.push(letter),
        }
    }
    words
}

/// What stands for the names in a command that a text is made with.
const FILLED_IN: &str = "NAME";

/// Whether a command is understood as it stands, or only shows how one is made; otherwise what is wrong with it.
fn understood(command: &str) -> Result<bool, clap::Error> {
    let said = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(value)) => value.clone(),
        _ => "?".to_owned(),
    };
    // A sentence names a command without saying what it needs, or shows where a name or number goes.
    let shows = |error: &clap::Error| match error.kind() {
        ErrorKind::MissingRequiredArgument | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => true,
        ErrorKind::InvalidValue => said(error, ContextKind::InvalidValue).is_empty(),
        // `millrace crypt` is a text in a format.
        ErrorKind::InvalidSubcommand => [FILLED_IN, "crypt"].contains(&said(error, ContextKind::InvalidSubcommand).as_str()),
        ErrorKind::ValueValidation => {
            command.contains(|letter: char| letter.is_uppercase()) || command.contains("--engine fvm-sim")
        }
        _ => false,
    };
    match Cli::try_parse_from(words(command)) {
        Ok(_) => Ok(true),
        Err(error) if shows(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The sources in a folder, tests apart.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests");
        if path.is_dir() && !is_test {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") && !is_test {
            found.push(path);
        }
    }
}

/// The commands that a program's messages propose, in quotes.
fn proposed(source: &str) -> Vec<String> {
    let code = source.split("mod tests {").next().unwrap_or_default();
    // Literals go on in the next line, where its first blanks do not count.
    let mut parts = code.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    let code = parts.fold(first, |code, part| code + part.trim_start());
    let quoted = code.split("\\\"").filter(|text| text.starts_with("millrace "));
    quoted.map(filled_in).collect()
}

/// A text with something in its places.
fn filled_in(text: &str) -> String {
    let mut parts = text.split('{');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + FILLED_IN + part.split_once('}').map_or(part, |(_, rest)| rest))
}

#[test]
fn commands_in_messages_are_understood() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths = Vec::new();
    for room in ["control", "services", "millrace"] {
        sources(&crates.join(room).join("src"), &mut paths);
    }
    let (mut found, mut wrong) = (0, Vec::new());
    for path in paths {
        for command in proposed(&fs::read_to_string(&path).unwrap()) {
            match understood(&command) {
                Ok(is_whole) => found += usize::from(is_whole),
                Err(error) => wrong.push(format!("{}: {command}\n{error}", path.display())),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(found > 30, "{found} commands were found");
}

#[test]
fn commands_in_the_documentation_are_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["docs", "docs/services", "docs/formats"].map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let pages = folders.into_iter().flatten().map(|entry| entry.unwrap().path()).chain([root.join("README.md")]);
    let (mut found, mut wrong) = (0, Vec::new());
    for page in pages.filter(|page| page.extension().is_some_and(|ending| ending == "md")) {
        for command in commands(&fs::read_to_string(&page).unwrap()) {
            match understood(&command) {
                Ok(is_whole) => found += usize::from(is_whole),
                Err(error) => wrong.push(format!("{}: {command}\n{error}", page.display())),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(found > 60, "{found} commands were found");
}

#[test]
fn what_the_service_manager_runs_is_understood() {
    let unit = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/millrace.service")).unwrap();
    let setting = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    let parse = |line: &str| Cli::try_parse_from(words(line)).unwrap_or_else(|error| panic!("{line}\n{error}"));
    // The directories that it makes are those of the daemon, and of who asks the daemon.
    let directories = ["/run/millrace", "/var/lib/millrace"].map(Path::new);
    assert_eq!((setting("RuntimeDirectory="), setting("StateDirectory=")), ("millrace", "millrace"));
    let start = parse(setting("ExecStart="));
    let Command::Serve(serve) = start.command else { panic!("the daemon is what it starts") };
    assert_eq!([start.global.run_dir(), serve.state_dir()], directories);
    assert_eq!(serve.config.as_deref(), Some(Path::new("/etc/millrace.toml")));
    let reload = parse(setting("ExecReload="));
    assert!(matches!(reload.command, Command::Upgrade(UpgradeArgs { binary: None, show: false, .. })));
    assert_eq!(reload.global.run_dir(), directories[0]);
}
