use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use lrmoe::cli::Cli;

/// Command lines, an argument in each line of the bytes: what is understood, written in one way for all, is understood the same; a refusal names what
/// it is about. Nothing is run.
pub fn command_line(data: &[u8]) {
    let arguments = data.split(|byte| *byte == b'\n');
    let arguments: Vec<OsString> = arguments
        .map(|bytes| OsString::from_vec(bytes.to_vec()))
        .collect();
    let parse = |arguments: &[OsString]| {
        let program = OsString::from("lrmoe");
        Cli::command().try_get_matches_from(std::iter::once(&program).chain(arguments))
    };
    match parse(&arguments) {
        Ok(matches) => {
            let cli = Cli::from_arg_matches(&matches).expect("matches of its own command");
            let written = written(&Cli::command(), &matches);
            let again = parse(&written);
            let again = again.unwrap_or_else(|error| panic!("{written:?}: {error}"));
            let again = Cli::from_arg_matches(&again).expect("matches of its own command");
            assert_eq!(format!("{again:?}"), format!("{cli:?}"), "{written:?}");
        }
        Err(error) => check_refusal(&error),
    }
}

/// The arguments given, options first and with `=`.
fn written(command: &Command, matches: &ArgMatches) -> Vec<OsString> {
    let (mut options, mut positions) = (Vec::new(), Vec::new());
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let long = argument.get_long().map(|long| format!("--{long}"));
        match (argument.get_action(), long) {
            (ArgAction::SetTrue, Some(long)) => options.push(long.into()),
            (ArgAction::Count, Some(long)) => {
                let times = matches.get_count(id).into();
                options.extend(std::iter::repeat_n(OsString::from(long), times));
            }
            (_, long) => {
                for value in matches.get_raw(id).into_iter().flatten() {
                    match &long {
                        None => positions.push(value.to_owned()),
                        Some(long) => {
                            let mut argument = OsString::from(format!("{long}="));
                            argument.push(value);
                            options.push(argument);
                        }
                    }
                }
            }
        }
    }
    match matches.subcommand() {
        Some((name, matches)) => {
            options.push(name.into());
            let command = command.find_subcommand(name).expect("it was found");
            options.append(&mut written(command, matches));
        }
        None if positions.is_empty() => {}
        None => {
            options.push("--".into());
            options.append(&mut positions);
        }
    }
    options
}

fn check_refusal(error: &clap::Error) {
    let message = error.to_string();
    assert!(!message.trim().is_empty());
    let helps = [
        ErrorKind::DisplayHelp,
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
        ErrorKind::DisplayVersion,
    ];
    if helps.contains(&error.kind()) {
        return;
    }
    assert_eq!(error.exit_code(), 2);
    let about = [
        ContextKind::InvalidArg,
        ContextKind::InvalidValue,
        ContextKind::InvalidSubcommand,
    ];
    let named = about.into_iter().filter_map(|kind| error.get(kind));
    let mut named = named.peekable();
    // Bytes that are no text cannot be shown.
    assert!(
        named.peek().is_some() || error.kind() == ErrorKind::InvalidUtf8,
        "{message}"
    );
    for value in named {
        let values = match value {
            ContextValue::String(text) => std::slice::from_ref(text),
            ContextValue::Strings(texts) => texts,
            _ => continue,
        };
        // What a terminal might take for a command is not repeated.
        let mut shown = values
            .iter()
            .filter(|text| !text.contains(char::is_control));
        assert!(
            shown.all(|text| message.contains(text.as_str())),
            "{message}"
        );
    }
}
